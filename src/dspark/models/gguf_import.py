"""Turn a GGUF file into a Hugging Face folder: config, bfloat16 safetensors, tokenizer, chat template.

The file is read with the ``gguf`` package directly. Supported are the architectures whose GGUF form loses nothing we
need (:data:`FAMILIES`) with the tokenizers that :mod:`dspark.models.gguf_tokenizer` can rebuild; everything else is
refused by name, because a model that is imported almost right answers almost right. Three things are easy to get wrong
and are checked here or in the tests: llama.cpp stores q and k of ``llama`` with their rows permuted, a file without
``output.weight`` has a tied head, and the rope base and scaling must be what the metadata says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from jaxtyping import BFloat16
from safetensors.torch import save_file
from torch import Tensor

from dspark.errors import ModelError
from dspark.models.gguf_tokenizer import Vocabulary, build_tokenizer, tokenizer_config

IMPORTER_VERSION = 1  # part of the name of imported folders: raise it whenever the result of an import changes
SHARD_BYTES = 4 << 30  # largest safetensors file we write, and so about the memory that an import takes
CHUNK_ELEMENTS = 1 << 25  # values dequantised at once: 128 MB in fp32


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one GGUF architecture maps to a model of transformers."""

    model_type: str
    architecture: str
    permuted: bool  # llama.cpp interleaves the rotary halves of q and k
    qk_norm: bool


FAMILIES = {
    "llama": Family(model_type="llama", architecture="LlamaForCausalLM", permuted=True, qk_norm=False),
    "qwen2": Family(model_type="qwen2", architecture="Qwen2ForCausalLM", permuted=False, qk_norm=False),
    "qwen3": Family(model_type="qwen3", architecture="Qwen3ForCausalLM", permuted=False, qk_norm=True),
}
MISTRAL = Family(model_type="mistral", architecture="MistralForCausalLM", permuted=True, qk_norm=False)

GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"  # Llama 3's scaling, stored as one divisor per frequency


class Metadata:
    """The key-value part of a GGUF file, with errors that name the key. ``prefix`` is the architecture."""

    def __init__(self, reader: GGUFReader) -> None:
        self.fields = reader.fields
        self.prefix = str(self.need("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:  # Any: GGUF values are numbers, strings, flags or lists
        """Value of ``key``; a leading dot stands for the architecture's prefix."""
        field = self.fields.get(self.prefix + key if key.startswith(".") else key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"the GGUF file lacks the metadata key {key!r}; convert the model again with llama.cpp")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A float32 as the decimal number it was written from: 1e-05, not 9.999999747378752e-06."""
        value = self.need(key) if default is None else self.get(key, default)
        return float(str(np.float32(value)))


def import_gguf(gguf_path: Path | str, folder: Path | str) -> None:
    """Write the model of ``gguf_path`` into ``folder`` (created if need be) as Hugging Face files in bfloat16.

    Not atomic by itself: :func:`dspark.models.weights.resolve_model` wraps it. Quantised tensors are dequantised; that
    is exact up to the rounding to bfloat16. Raises :class:`ModelError` for a file that is damaged, split, or of an
    architecture or tokenizer we do not support, and when a tensor is missing or has another shape than the config says.
    """
    gguf_path, folder = Path(gguf_path), Path(folder)
    reader = _open(gguf_path)
    metadata = Metadata(reader)
    config, family = build_config(metadata, {t.name: t for t in reader.tensors})
    vocabulary = read_vocabulary(metadata, config["vocab_size"])
    tokenizer = build_tokenizer(vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    _write_tensors(reader.tensors, config, family, folder)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(metadata))
    _write_json(
        folder / "tokenizer_config.json", tokenizer_config(vocabulary, max_length=config["max_position_embeddings"])
    )
    tokenizer.save(str(folder / "tokenizer.json"))


class _Reader(GGUFReader):
    """A reader whose slices are plain arrays: numpy's memmap makes each of half a million slices twice as slow."""

    data: np.ndarray

    def _get(self, *arguments: Any, **options: Any) -> Any:  # Any: passed through as they are
        if isinstance(self.data, np.memmap):
            self.data = self.data.view(np.ndarray)
        return super()._get(*arguments, **options)


def _open(path: Path) -> GGUFReader:
    if not path.is_file():
        raise ModelError(f"{path} is not a file; give the path of a .gguf file")
    try:
        reader = _Reader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{path} is not a readable GGUF file ({error}); it may be cut off: download it again"
        ) from None
    split = reader.fields.get("split.count")
    if split is not None and split.contents() > 1:
        raise ModelError(f"{path} is one of {split.contents()} parts; join them first with `llama-gguf-split --merge`")
    return reader


# --- config ----------------------------------------------------------------------------------------------------------


def build_config(metadata: Metadata, tensors: dict[str, ReaderTensor]) -> tuple[dict[str, Any], Family]:
    """The content of config.json, and the family, from metadata and the tensors that are there."""
    family = FAMILIES.get(metadata.prefix)
    if family is None:
        raise ModelError(
            f"the GGUF architecture is {metadata.prefix!r}; only {', '.join(FAMILIES)} can be imported: "
            "give the model's Hugging Face folder or Hub id instead"
        )
    if metadata.get(".expert_count", 0):
        raise ModelError(
            f"the GGUF file is a mixture of {metadata.get('.expert_count')} experts; give its Hub id instead"
        )
    window = metadata.get(".attention.sliding_window", 0)
    if window:
        if metadata.prefix != "llama":
            raise ModelError(f"sliding_window is {window} in a {metadata.prefix} GGUF; give the model's Hub id instead")
        family = MISTRAL
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("the GGUF file has no token_embd.weight; it holds no language model")
    heads, kv_heads, head_dim = _attention_shape(metadata)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": int(embedding.shape[1]),  # ggml counts the fastest dimension first
        "hidden_size": metadata.need(".embedding_length"),
        "intermediate_size": metadata.need(".feed_forward_length"),
        "num_hidden_layers": metadata.need(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.need(".context_length"),
        "rms_norm_eps": metadata.real(".attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.real(".rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, tensors.get(ROPE_FREQS), head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        **_token_ids(metadata),
    }
    if window:
        config["sliding_window"] = window
    if family.model_type in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if family.model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    return config, family


def _attention_shape(metadata: Metadata) -> tuple[int, int, int]:
    heads = metadata.need(".attention.head_count")
    kv_heads = metadata.get(".attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise ModelError("the GGUF file has other head counts in every layer; give the model's Hub id instead")
    head_dim = metadata.get(".attention.key_length", metadata.need(".embedding_length") // heads)
    for key in (".attention.value_length", ".rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim:
            raise ModelError(
                f"{metadata.prefix}{key} is {metadata.get(key)}, the head size {head_dim}; they must be equal"
            )
    return heads, kv_heads, head_dim


def _rope_scaling(metadata: Metadata, freqs: ReaderTensor | None, head_dim: int) -> dict[str, Any] | None:
    if freqs is not None:
        return _llama3_scaling(np.asarray(freqs.data, dtype=np.float32), metadata, head_dim)
    kind = metadata.get(".rope.scaling.type", "none")
    factor = metadata.real(".rope.scaling.factor", metadata.get(".rope.scale_linear", 1.0))
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = metadata.need(".rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"{metadata.prefix}.rope.scaling.type is {kind!r}; none, linear and yarn can be imported")


def _llama3_scaling(divisors: np.ndarray, metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """Find the parameters that llama.cpp made the divisors from, and prove it by making them again."""
    base = metadata.real(".rope.freq_base", 10000.0)
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    again = 1.0 / ((1.0 - smooth) / factor + smooth)
    if divisors.shape != again.shape or not np.allclose(divisors, again, rtol=1e-3):
        raise ModelError(f"the tensor {ROPE_FREQS} is no Llama 3 rope scaling; give the model's Hub id instead")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _token_ids(metadata: Metadata) -> dict[str, int | None]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}


def _generation_config(metadata: Metadata) -> dict[str, Any]:
    """Stop ids are all the ids that end a turn: llama.cpp stops at each of them as well."""
    stops = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(s for s in stops if s is not None))
    eos = unique[0] if len(unique) == 1 else unique or None
    return {**_token_ids(metadata), "eos_token_id": eos}


def read_vocabulary(metadata: Metadata, vocab_size: int) -> Vocabulary:
    """The tokenizer's part of the metadata; no token may lie beyond the ``vocab_size`` rows of the embedding."""
    tokens = metadata.need("tokenizer.ggml.tokens")
    if len(tokens) > vocab_size:
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but only {vocab_size} embeddings; convert it again")
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id >= len(tokens):
            raise ModelError(f"tokenizer.ggml.{key}_token_id is {token_id}; the vocabulary has {len(tokens)} tokens")
        if token_id is not None:
            special[name] = token_id
    return Vocabulary(
        kind=metadata.need("tokenizer.ggml.model"),
        pre=metadata.get("tokenizer.ggml.pre", "default"),
        tokens=tokens,
        types=metadata.get("tokenizer.ggml.token_type"),
        merges=metadata.get("tokenizer.ggml.merges", []),
        special_ids=special,
        add_bos=metadata.get("tokenizer.ggml.add_bos_token"),
        space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


# --- tensors ---------------------------------------------------------------------------------------------------------


def expected_shapes(config: dict[str, Any], family: Family) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the model of ``config`` has; a tied head has none of its own."""
    d, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
    for name, out, wide in (("q", q_size, d), ("k", kv_size, d), ("v", kv_size, d), ("o", d, q_size)):
        layer[f"self_attn.{name}_proj.weight"] = (out, wide)
        if config.get("attention_bias") or (family.model_type == "qwen2" and name != "o"):
            layer[f"self_attn.{name}_proj.bias"] = (out,)
    for name, out, wide in (("gate", inner, d), ("up", inner, d), ("down", d, inner)):
        layer[f"mlp.{name}_proj.weight"] = (out, wide)
        if config.get("mlp_bias"):
            layer[f"mlp.{name}_proj.bias"] = (out,)
    if family.qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config["head_dim"],)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, d)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _write_tensors(tensors: list[ReaderTensor], config: dict[str, Any], family: Family, folder: Path) -> None:
    """Write safetensors shards, after checking the file's names and shapes against the config's."""
    sources = {_hf_name(t.name): t for t in tensors if t.name != ROPE_FREQS}
    expected = expected_shapes(config, family)
    if missing := sorted(expected.keys() - sources.keys()):
        raise ModelError(f"the GGUF file lacks {len(missing)} tensors, the first is {missing[0]}; convert it again")
    if extra := sorted(sources.keys() - expected.keys()):
        raise ModelError(f"the GGUF file holds {extra[0]}, which a {family.model_type} model does not have")
    for name, tensor in sources.items():
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if shape != expected[name]:
            raise ModelError(f"{tensor.name} has shape {shape} in the GGUF file; its metadata ask for {expected[name]}")
    shards = list(_plan_shards(expected))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        single = len(shards) == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {name: _read_tensor(name, sources[name], config, family) for name in names}
        save_file(content, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors makes files that only their owner may read
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(2 * int(np.prod(shape)) for shape in expected.values())
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


def _plan_shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        if names and size + nbytes > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def _hf_name(name: str) -> str:
    if name in GLOBAL_TENSORS:
        return GLOBAL_TENSORS[name]
    match name.split("."):
        case ["blk", number, part, ("weight" | "bias") as kind] if number.isdigit() and part in LAYER_TENSORS:
            return f"model.layers.{number}.{LAYER_TENSORS[part]}.{kind}"
    raise ModelError(f"the GGUF file holds the tensor {name}, which we cannot place; give the model's Hub id instead")


def _read_tensor(name: str, source: ReaderTensor, config: dict[str, Any], family: Family) -> BFloat16[Tensor, "..."]:
    tensor = _dequantise(source)
    if family.permuted and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        tensor = unpermute_rows(tensor, heads)
    return tensor


def _dequantise(source: ReaderTensor) -> BFloat16[Tensor, "..."]:
    """A tensor's values in bfloat16, in chunks of rows so that fp32 never holds all of a large table."""
    shape = tuple(int(n) for n in reversed(source.shape))
    result = torch.empty(shape, dtype=torch.bfloat16)
    step = max(1, CHUNK_ELEMENTS // int(np.prod(shape[1:], initial=1)))
    for start in range(0, shape[0], step):
        try:
            chunk = gguf.dequantize(source.data[start : start + step], source.tensor_type)
        except NotImplementedError:
            raise ModelError(f"{source.name} is quantised as {source.tensor_type.name}, which cannot be read") from None
        result[start : start + step] = torch.from_numpy(np.require(chunk, np.float32, ["C", "W"]))
    return result


def unpermute_rows(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's reordering of the rows of q or k (weight or bias), head by head.

    It stores rotary pair (i, i + head_dim/2) of a head as neighbouring rows (2i, 2i + 1); transformers rotates halves.
    """
    per_head = weight.shape[0] // heads
    return weight.reshape(heads, per_head // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
