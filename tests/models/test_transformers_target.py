"""The transformers target equals the plain library, on our own memory, with rollback, or refuses the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import FAMILIES, LAYERS, SHAPE, VOCAB, reference, save_model, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from dspark.errors import ConfigError, ModelError, RequestError
from dspark.models.lean import LeanTarget
from dspark.models.loading import load_target
from dspark.models.target import FINAL
from dspark.models.transformers_target import TransformersTarget

TAPS = tuple(range(-1, LAYERS - 1))
TEXT: dict[str, Any] = {**SHAPE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# Families that lean does not cover, each with a difference of its own.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 (learned positions)": ("GPT2Config", {"n_embd": 48, "n_layer": LAYERS, "n_head": 6, "n_positions": 256}),
    "cohere (scaled logits)": ("CohereConfig", {"logit_scale": 0.25}),
    "granite (scaled embeddings)": ("GraniteConfig", {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "pythia (partial rotation)": ("GPTNeoXConfig", {}),
    "qwen3 moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "deepseek (keys wider than values)": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 6,
            "head_dim": 8,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
        },
    ),
}


def other_model(name: str) -> PreTrainedModel:
    config_class, extra = OTHERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**TEXT, **extra})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def close(a: Tensor | None, b: Tensor) -> None:
    assert a is not None
    torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def check_parity(model: PreTrainedModel, target: TransformersTarget) -> None:
    """Pieces, rollback and several rows give what the library gives for whole sequences."""
    memory = target.new_memory(rows=3, max_len=48)
    first, second = tokens(40), tokens(25, seed=1)
    target.forward(first[:20], memory, rows=[2])
    target.forward(tokens(9, seed=2), memory, rows=[2])
    memory.rollback(2, 20)
    target.forward(second[:11], memory, rows=[0], want_logits=False)
    memory.rollback(0, 4)
    new = torch.cat((first[20:], second[4:24]))
    out = target.forward(new, memory, rows=[2, 0], counts=[20, 20], taps=TAPS)
    wanted = [
        torch.cat(both)
        for both in zip(*(cut(model, ids, n) for ids, n in ((first, 20), (second[:24], 4))), strict=True)
    ]
    for got, want in zip((out.logits, out.features, out.final), wanted, strict=True):
        close(got, want)
    assert memory.lengths == [24, 0, 40]
    last = target.forward(second[24:], memory, last_only=True)
    close(last.logits, reference(model, second)[0][-1:])
    close(target.logits(out.final), wanted[0])


def cut(model: PreTrainedModel, ids: Tensor, begin: int) -> tuple[Tensor, Tensor, Tensor]:
    logits, features, final = reference(model, ids)
    return logits[begin:], features[begin:], final[begin:]


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_library_on_lean_families(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    target = load_target(save_model(model, tmp_path), dtype="float32", device="cpu", implementation="transformers")
    assert isinstance(target, TransformersTarget)
    check_parity(model, target)


@pytest.mark.parametrize("name", OTHERS)
def test_equals_the_library_on_other_families(name: str, tmp_path: Path) -> None:
    model = other_model(name)
    target = load_target(save_model(model, tmp_path), dtype="float32", device="cpu")
    assert isinstance(target, TransformersTarget), "lean does not cover this family"
    check_parity(model, target)


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite (scaled embeddings)"])
def test_embed_and_head(name: str) -> None:
    model = tiny_model(name) if name in FAMILIES else other_model(name)
    target = TransformersTarget(model)
    ids = tokens(6)
    close(target.embed(ids.reshape(2, 3)).reshape(6, -1), reference(model, ids)[1][:, : SHAPE["hidden_size"]])
    close(target.head_weight(), model.get_output_embeddings().weight.detach())


def test_image_text_model(tmp_path: Path) -> None:
    """The text path of an image-text model; lean takes the same folder's text part."""
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**TEXT, **FAMILIES["gemma3"][1]},
        vision_config={**vision, "image_size": 8, "patch_size": 4},
        image_token_index=VOCAB - 1,
        mm_tokens_per_image=4,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    folder = save_model(model, tmp_path)
    library, lean = (
        load_target(folder, dtype="float32", device="cpu", implementation=name) for name in ("transformers", "lean")
    )
    assert isinstance(library, TransformersTarget) and isinstance(lean, LeanTarget)
    ids = tokens(30) % (VOCAB - 1)
    with torch.no_grad():
        wanted = model(input_ids=ids[None]).logits[0]
    for target in (library, lean):
        memory = target.new_memory(rows=1, max_len=32)
        parts = [target.forward(part, memory, taps=(0, 2)) for part in ids.split([12, 18])]
        close(torch.cat([part.logits for part in parts if part.logits is not None]), wanted)


@pytest.mark.parametrize(
    ("config_class", "extra"),
    [
        ("MambaConfig", {"state_size": 4}),
        ("RwkvConfig", {"attention_hidden_size": 48}),
        ("Qwen3NextConfig", {"num_experts": 2, "moe_intermediate_size": 8, "linear_num_value_heads": 2}),
        ("FalconH1Config", {}),
    ],
)
def test_state_that_cannot_roll_back_is_refused(config_class: str, extra: dict[str, Any]) -> None:
    config = getattr(transformers, config_class)(**{**TEXT, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with pytest.raises(ModelError, match="rolled back"):
        TransformersTarget(model)


def test_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="encoder-decoder"):
        TransformersTarget(transformers.T5ForConditionalGeneration(config))


def test_taps_and_overflow_are_refused() -> None:
    target = TransformersTarget(tiny_model("llama"))
    memory = target.new_memory(rows=1, max_len=8)
    with pytest.raises(ConfigError, match="target_layer_ids"):
        target.forward(tokens(3), memory, taps=(LAYERS - 1,))
    with pytest.raises(RequestError, match="max_len 8"):
        target.forward(tokens(9), memory)
    assert memory.lengths == [0]


def test_the_final_state_can_be_tapped() -> None:
    target = TransformersTarget(tiny_model("llama"))
    out = target.forward(tokens(5), target.new_memory(rows=1, max_len=8), taps=(0, FINAL))
    assert out.features is not None
    assert torch.equal(out.features[:, out.final.shape[1] :], out.final)
