"""What a DSpark drafter takes in, in one compiled call: the features of committed tokens become keys and values.

The plain form is the products one by one with :class:`dspark.models.draft_ops.ContextWriter` behind them, which rounds
to bfloat16 in between where compiled code does not.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.models.compiled_products import compiled_forms
from dspark.models.draft_ops import Angles
from dspark.models.eight_bit import ProductForm
from dspark.models.lean_memory import LeanMemory
from dspark.models.linear import Linear
from dspark.models.native import Attention, NativeOps
from dspark.models.norm import RMSNorm

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _Intake(ctypes.Structure):
    """``struct intake`` of short_pass.c, field by field."""

    _fields_ = (
        ("attention", Attention),
        *((name, ProductForm) for name in ("fc", "kv")),
        *((name, _pointer) for name in ("norm", "key_norm", "features", "x", "h", "projected")),
        *((name, _int64) for name in ("layer_stride", "values_offset", "layers", "hidden")),
    )


class Intake:
    """Projects features into keys and values of every layer, normed and rotated as attention wants them."""

    def __init__(
        self,
        ops: NativeOps,
        fc: Linear,
        norm: RMSNorm,
        kv: Linear,
        key_norms: Float[Tensor, "layers head_dim"],
        forms: tuple[ProductForm, ProductForm],
        angles: Angles,
    ) -> None:
        self._run, self._rope, self._angles = ops.library.take_in, ops.config.rope, angles
        self._run.argtypes, self._run.restype = [ctypes.POINTER(_Intake)], None
        self._owned = (fc, norm, kv, key_norms.float().contiguous())  # what the structure points to
        config = ops.config
        self._alike = _Intake(fc=forms[0], kv=forms[1], layers=len(key_norms), hidden=fc.out_features)
        self._alike.norm, self._alike.key_norm = norm.exact.data_ptr(), self._owned[3].data_ptr()
        self._alike.attention.kv_heads, self._alike.attention.eps = config.num_kv_heads, config.rms_eps
        self._width = 2 * fc.out_features + kv.out_features
        self._into: weakref.ref[LeanMemory] | None = None  # the last memory; it is not ours to keep
        self._known = self._alike  # what is the same in all calls that write into it

    def __call__(
        self,
        memory: LeanMemory,
        rows: Int[Tensor, "tokens"],
        positions: Int[Tensor, "tokens"],
        features: Float[Tensor, "tokens features"],
    ) -> None:
        """Write tokens of any rows, in all layers at once; mutates ``memory``, but not its lengths.

        ``rows`` and ``positions`` are of 64 bits, on the CPU; a position's page must be in the table.
        """
        tokens = len(rows)
        rows, positions, features = rows.contiguous(), positions.contiguous(), features.contiguous()
        scratch = torch.empty(tokens * self._width, dtype=features.dtype)
        p = _Intake.from_buffer_copy(self._bound(memory))
        p.features, p.x = features.data_ptr(), scratch.data_ptr()
        p.h = p.x + tokens * p.hidden * scratch.element_size()
        p.projected = p.h + tokens * p.hidden * scratch.element_size()
        a = p.attention  # a part of p
        a.request, a.position, a.tokens = rows.data_ptr(), positions.data_ptr(), tokens
        self._run(ctypes.byref(p))

    def _bound(self, memory: LeanMemory) -> _Intake:
        """The structure with all that stays the same as long as tokens go into ``memory``."""
        if self._into is not None and self._into() is memory:
            return self._known
        p, table = _Intake.from_buffer_copy(self._alike), memory.table
        cos, sin = self._angles(self._rope, memory.max_len)
        p.layer_stride, p.values_offset = memory.both.stride()[:2]
        a = p.attention
        a.keys, a.table, a.cos, a.sin = (x.data_ptr() for x in (memory.both, table, cos, sin))
        a.stretches, a.page_size = table.shape[1], memory.page_size
        self._into, self._known, self._pointed_to = weakref.ref(memory), p, (table, cos, sin)
        return p


def intake(
    ops: NativeOps, fc: Linear, norm: RMSNorm, kv: Linear, key_norms: Float[Tensor, "layers head_dim"], angles: Angles
) -> Intake | None:
    """The call; None where the compiled products do not give the library's bits."""
    forms = compiled_forms([fc, kv], ops.library)
    return None if forms is None else Intake(ops, fc, norm, kv, key_norms, (forms[0], forms[1]), angles)
