"""The lean decoder's small operations as compiled C: between two products of a layer lies one call.

On a CPU, streaming the weights empties the caches, and each of PyTorch's small operations then starts cold: in a decode
step of a small model they take half as long again as the products. ``native.c`` fuses them; a C compiler builds it in
about a second for the model at hand, once, into the cache folder. Where there is no compiler, or the model has a part
that the C code leaves out, the plain operations serve (:mod:`dspark.models.plain`), which are also its reference.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.artifacts import dspark_home
from dspark.errors import ConfigError
from dspark.models.decoder_config import DecoderConfig
from dspark.models.layer import AngleTables, Attend
from dspark.models.lean_memory import LeanMemory
from dspark.models.lean_weights import Layer
from dspark.models.norm import RMSNorm

SOURCE = Path(__file__).with_name("short_pass.c")  # which includes the others
PARTS = tuple(Path(__file__).with_name(name) for name in ("native.c", "products.c"))
LANES = 16  # floats that the C code handles at once
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")  # never -ffast-math:
# linking with it would switch denormal numbers off in the whole process

_log = logging.getLogger(__name__)
_pointer, _int64, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Attention(ctypes.Structure):
    """``struct attention`` of native.c, field by field."""

    _fields_ = (
        *(
            (name, _pointer)
            for name in ("qkv", "out", "keys", "values", "table", "request", "position", "last", "cos", "sin", "norm")
        ),
        ("queries", _pointer),
        *((name, _int64) for name in ("tokens", "kv_heads", "stretches", "page_size", "window")),
        *((name, _float) for name in ("eps", "scale", "softcap")),
    )


class NativeOps:
    """The operations of :class:`dspark.models.plain.PlainOps`, compiled."""

    def __init__(self, config: DecoderConfig, library: ctypes.CDLL) -> None:
        self.config, self.library = config, library
        self._rms_norm, self._gated, self._attention = library.rms_norm, library.gated, library.attention
        self._rms_norm.argtypes = [_pointer] * 5 + [_float, _int64, _int64]
        self._gated.argtypes = [_pointer, _pointer, _int64, _int64]
        self._rms_norm.restype = self._gated.restype = None
        self._attention.argtypes = [ctypes.POINTER(Attention)]

    def norm(self, x: Float[Tensor, "tokens hidden"], norm: RMSNorm) -> Float[Tensor, "tokens hidden"]:
        """RMSNorm of ``x``."""
        y = torch.empty_like(x)
        self._rms_norm(x.data_ptr(), None, None, y.data_ptr(), norm.exact.data_ptr(), norm.eps, *x.shape)
        return y

    def add_norm(
        self, x: Float[Tensor, "tokens hidden"], added: Float[Tensor, "tokens hidden"], norm: RMSNorm
    ) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens hidden"]]:
        """x + added, and the RMSNorm of that."""
        total, y = torch.empty_like(x), torch.empty_like(x)
        pointers = (x.data_ptr(), added.data_ptr(), total.data_ptr(), y.data_ptr(), norm.exact.data_ptr())
        self._rms_norm(*pointers, norm.eps, *x.shape)
        return total, y

    def gate(self, gate_up: Float[Tensor, "tokens both"]) -> Float[Tensor, "tokens width"]:
        """activation(gate) * up."""
        rows, both = gate_up.shape
        y = torch.empty(rows, both // 2, dtype=gate_up.dtype)
        self._gated(gate_up.data_ptr(), y.data_ptr(), rows, both // 2)
        return y

    def attention(
        self,
        memory: LeanMemory,
        rows: Sequence[int],
        counts: Sequence[int],
        layers: Sequence[Layer],
        tables: AngleTables,
        *,
        causal: bool = True,
    ) -> Attend:
        """Self-attention for one pass: a function from layer index and [tokens, q, k and v] to [tokens, heads].

        Rows past the batch's tokens are let through as zeros. Each token sees the memory's keys of its row up to its
        own position (``causal`` False: up to the pass's last of its row), so a ragged batch needs neither padding nor
        masks. ``tables`` gives cosines and sines [positions, head_dim / 2] in fp32.
        """
        config, width = self.config, self.config.num_heads * self.config.head_dim
        a, kept = self.places(memory, rows, counts, causal=causal)
        layer_bytes, half_bytes = memory.both[0].nbytes, memory.both[0, 0].nbytes
        base, tokens = memory.both.data_ptr(), a.tokens
        angles = {False: tables(config.rope), True: tables(config.local_rope)}

        def attend(i: int, qkv: Tensor) -> Tensor:
            layer, alive = layers[i], kept  # what the structure points to
            cos, sin = angles[layer.slides]
            out = torch.empty(qkv.shape[0], width, dtype=qkv.dtype)
            out[tokens:] = 0  # rows that only fill the products up
            a.qkv, a.out, a.cos, a.sin = qkv.data_ptr(), out.data_ptr(), cos.data_ptr(), sin.data_ptr()
            a.keys = base + i * layer_bytes
            a.values = a.keys + half_bytes
            a.window = config.sliding_window if layer.slides else 0
            a.norm = None if layer.qk_norm is None else layer.qk_norm.exact.data_ptr()
            if self._attention(ctypes.byref(a)):
                raise MemoryError("no memory for attention scores; shorten the context")
            del alive
            return out

        return attend

    def places(
        self, memory: LeanMemory, rows: Sequence[int], counts: Sequence[int], *, causal: bool
    ) -> tuple[Attention, tuple[object, ...]]:
        """What all layers of a pass share; and what must be kept as long as the structure is used."""
        config = self.config
        pages, where = _places(memory, rows, counts, causal=causal)
        scratch = torch.empty(where.shape[1], config.num_heads * config.head_dim)
        a = self.alike()
        a.tokens, a.page_size = where.shape[1], memory.page_size
        a.table, a.stretches = pages.ctypes.data, pages.shape[1]
        a.request, a.position, a.last = (places.ctypes.data for places in where)
        a.queries = scratch.data_ptr()
        return a, (pages, where, scratch)

    def alike(self) -> Attention:
        """What all passes share."""
        config = self.config
        a = Attention(kv_heads=config.num_kv_heads, eps=config.rms_eps, scale=config.attention_scale)
        a.softcap = config.attention_softcap or 0.0
        return a


def _places(
    memory: LeanMemory, rows: Sequence[int], counts: Sequence[int], *, causal: bool
) -> tuple[Int[np.ndarray, "requests stretches"], Int[np.ndarray, "3 tokens"]]:
    """A copy of a pass's page tables; and of each token its request, its position and the last position it sees."""
    new, past = np.array(counts, dtype=np.int64), np.array([memory.lengths[row] for row in rows], dtype=np.int64)
    ends = past + new
    pages = memory.table.numpy()[np.array(rows), : -(-int(ends.max()) // memory.page_size)]
    where = np.empty((3, int(new.sum())), dtype=np.int64)
    where[0] = np.repeat(np.arange(len(new)), new)
    where[1] = np.arange(where.shape[1]) + np.repeat(ends - new.cumsum(), new)
    where[2] = where[1] if causal else np.repeat(ends - 1, new)
    return np.ascontiguousarray(pages), where


def native_ops(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> NativeOps | None:
    """Compiled operations for a model; None where it, the device or the machine does not allow them.

    See :func:`native_wanted` for the switch.
    """
    wanted = native_wanted()
    covered = (
        device.type == "cpu"
        and dtype in (torch.bfloat16, torch.float32)
        and config.activation in ACTIVATIONS
        and config.head_dim % (2 * LANES) == 0
        and config.hidden_size % LANES == config.intermediate_size % LANES == 0
    )
    if not wanted or not covered:
        return None
    activation = ACTIVATIONS[config.activation]
    library = _build(dtype == torch.bfloat16, config.head_dim, config.group, activation)
    return None if library is None else NativeOps(config, library)


def native_wanted() -> bool:
    """False if the environment variable ``DSPARK_NATIVE`` is 0; raises :class:`ConfigError` unless it is 0 or 1."""
    wanted = os.environ.get("DSPARK_NATIVE", "1")
    if wanted not in ("0", "1"):
        raise ConfigError(f"DSPARK_NATIVE is {wanted!r}; it must be 1 (compiled small operations) or 0 (none)")
    return wanted == "1"


@functools.cache
def _build(bfloat16: bool, head_dim: int, group: int, activation: int) -> ctypes.CDLL | None:
    """short_pass.c with native.c for one kind of model."""
    return compiled(
        SOURCE,
        (
            f"-DSTATE_BF16={int(bfloat16)}",
            f"-DHEAD_DIM={head_dim}",
            f"-DGROUP={group}",
            f"-DACTIVATION={activation}",
        ),
        PARTS,
    )


def compiled(source: Path, defines: tuple[str, ...], includes: tuple[Path, ...] = ()) -> ctypes.CDLL | None:
    """Compile ``source``, or take it from the cache folder; None without a working compiler.

    ``includes``: the files beside it that it includes.
    """
    compiler = _compiler()
    if compiler is None:
        _log.info("no C compiler found; the plain operations serve")
        return None
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    threads = ("-fopenmp",) if _shares_threads() else ()
    texts = [path.read_text() for path in (source, *includes)]
    parts = (*texts, *FLAGS, *threads, *defines, *compiler, version, _cpu())
    name = f"{source.stem}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"
    path = dspark_home() / "native" / name
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = path.parent
        except OSError:  # a home that cannot be written to: build for this process alone
            folder = Path(tempfile.mkdtemp(prefix="dspark-native-"))
            path = folder / name
        if not _compile([*compiler, *FLAGS, *threads, *defines, str(source), "-lm"], path):
            return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _log.info("the compiled operations do not load (%s); the plain ones serve", error)
        return None


def _compile(command: list[str], path: Path) -> bool:
    """Build into ``path`` in one step; False if that fails."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        try:
            result = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            _log.info("%s failed (%s); the plain operations serve", shlex.join(command), error)
            return False
        if result.returncode != 0:
            _log.info("%s failed; the plain operations serve\n%s", shlex.join(command), result.stderr)
            return False
        os.replace(built, path)
        return True


def _shares_threads() -> bool:
    """Whether compiled code would run on PyTorch's own OpenMP threads.

    It does if PyTorch has loaded the library under the name that a compiler links to. Under another name there would be
    a second pool of threads, and the two would wait for each other's cores; then one thread is faster.
    """
    try:
        return any(line.rstrip().endswith("/libgomp.so.1") for line in open("/proc/self/maps"))
    except OSError:
        return False


def _compiler() -> list[str] | None:
    """The C compiler: ``$CC`` if set, else what the system calls cc, gcc or clang."""
    if os.environ.get("CC", "").strip():
        command = shlex.split(os.environ["CC"])
        return command if shutil.which(command[0]) else None
    return next(([path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def _cpu() -> str:
    """What ``-march=native`` depends on: a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "|".join(sorted({line for line in lines if line.startswith(kinds)}))
