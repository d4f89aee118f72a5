"""Tiny targets and drafters for engines, requests by the handful, and what `dspark.decode` makes of each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import transformers
from history_rig import HistoryDrafter, HistoryTarget
from tiny_drafter import fill, tiny_eagle3_config, tiny_mtp_config
from tiny_drafter import tiny_drafter as make_drafter
from tiny_models import FAMILIES, SHAPE, VOCAB

from dspark.core import Completion, Proposal, SamplingParams
from dspark.decode import generate
from dspark.maths.scheduling import FixedScheduler
from dspark.models.decoder_config import from_transformers
from dspark.models.drafter import Drafter, NoDrafter
from dspark.models.dspark import DsparkDrafter
from dspark.models.eagle3 import Eagle3Model
from dspark.models.eagle3_drafter import Eagle3Drafter
from dspark.models.lean import LeanTarget
from dspark.models.lookup_drafter import LookupDrafter
from dspark.models.mtp import MTPModel
from dspark.models.mtp_drafter import MTPDrafter
from dspark.models.ngram import NgramDrafter
from dspark.models.target import Target
from dspark.models.transformers_target import TransformersTarget
from dspark.serve.engine import Engine
from dspark.serve.events import StepEvent
from dspark.serve.request import GenerationRequest

BLOCK, LAYERS = 3, 2


@cache
def tiny_target(family: str, implementation: str = "lean") -> Target:
    """A model of the family with two layers and weights far from uniform, in fp32; "history" is no model at all."""
    if family == "history":
        return HistoryTarget(vocab_size=64, max_len=64, sharpness=3.0)
    config_class, extra = FAMILIES[family]
    shape = {**SHAPE, **extra, "num_hidden_layers": LAYERS}
    if "layer_types" in shape:
        shape["layer_types"] = shape["layer_types"][:LAYERS]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**shape, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= 1 if "norm" in name or "bias" in name else 7
    if implementation == "transformers":
        return TransformersTarget(model, name=family)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return LeanTarget(from_transformers(model.config), tensors, name=family, dtype=torch.float32)


def eager_lookup() -> AbstractContextManager[None]:
    """Drafts wherever a single token stood in the text before: short texts of tiny models repeat little else."""
    return patch.multiple("dspark.maths.lookup", SHORTEST=1, TRUSTED=0.0)


class Sharp:
    """A drafter that proposes what the target would say next half of the time, so that drafts live and die."""

    name, taps, has_confidence, block_size = "sharp", (0,), False, BLOCK

    def __init__(self, target: Target) -> None:
        self.target = target

    def open(self, *, max_len: int) -> list[int]:
        return []

    def extend(self, state: list[int], token_ids: torch.Tensor, features: torch.Tensor | None) -> None:
        assert features is not None and features.shape == (len(token_ids), self.target.info.hidden_size)
        state += token_ids.tolist()

    def propose(
        self, state: list[int], anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        text, vocab = [*state, anchor], self.target.info.vocab_size
        memory = self.target.new_memory(rows=1, max_len=min(len(text) + BLOCK, self.target.info.max_len))
        logits = self.target.forward(torch.tensor(text), memory, last_only=True).logits
        drafts: list[int] = []
        for k in range(max(0, min(limit, BLOCK))):
            assert logits is not None
            right = (sum(text) + k) % 3 > 0
            drafts.append(int(logits[0].argmax()) if right else (text[-1] * 7 + k) % vocab)
            if k + 1 < limit and len(text) + k < self.target.info.max_len - 1:
                logits = self.target.forward(torch.tensor(drafts[-1:]), memory, last_only=True).logits
            else:
                break
        return Proposal(torch.tensor(drafts, dtype=torch.long))


def shape_for(target: Target) -> dict[str, Any]:  # Any: fields of every type
    """What a drafter's config needs to know of the target."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": target.info.hidden_size,
        "num_target_layers": LAYERS,
        "max_position_embeddings": SHAPE["max_position_embeddings"],
        "block_size": BLOCK,
    }


def tiny_dspark(target: Target) -> DsparkDrafter:
    model = make_drafter(seed=4, scale=0.3, norms=1.0, **shape_for(target), mask_token_id=3, target_layer_ids=(0,))
    return DsparkDrafter(model, target, candidates=8)


def tiny_eagle3(target: Target) -> Eagle3Drafter:
    config = tiny_eagle3_config(**shape_for(target), target_layer_ids=(0,))
    model = fill(Eagle3Model(config), torch.Generator().manual_seed(4), scale=0.3, norms=1.0)
    return Eagle3Drafter(model, target, candidates=8)


def tiny_mtp(target: Target) -> MTPDrafter:
    model = fill(MTPModel(tiny_mtp_config(**shape_for(target))), torch.Generator().manual_seed(4), scale=0.3, norms=1.0)
    return MTPDrafter(model, target, candidates=8)


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "none": lambda target: NoDrafter(),
    "ngram": lambda target: NgramDrafter(block_size=BLOCK, min_match=1),
    "sharp": Sharp,
    "dspark": tiny_dspark,
    "eagle3": tiny_eagle3,
    "mtp": tiny_mtp,
}


@cache
def tiny_drafter(family: str, name: str, implementation: str = "lean") -> Drafter:
    target = tiny_target(family, implementation)
    if name == "history":
        assert isinstance(target, HistoryTarget)
        return HistoryDrafter(target, block_size=BLOCK, blur=1.5)
    if name.endswith("+lookup"):
        return LookupDrafter(tiny_drafter(family, name.removesuffix("+lookup"), implementation))
    return DRAFTERS[name](target)


@cache
def alone(
    family: str, drafter: str, verify_len: int | None, request: GenerationRequest, implementation: str = "lean"
) -> Completion:
    """What the loop at batch size 1 makes of a request."""
    return generate(
        tiny_target(family, implementation),
        tiny_drafter(family, drafter, implementation),
        request.prompt_ids,
        sampling=request.sampling,
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=request.stop_token_ids,
        scheduler=FixedScheduler(verify_len),
    )


def run(engine: Engine, requests: Iterable[GenerationRequest] = ()) -> dict[str, list[StepEvent]]:
    """Add ``requests`` and step until nothing is left, with the books checked after every step."""
    events: dict[str, list[StepEvent]] = {}
    for request in requests:
        engine.add(request)
        events[request.request_id] = []
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        engine.roster.check()
    return events


def tokens_of(events: Iterable[StepEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def text_of(events: Iterable[StepEvent]) -> str:
    return "".join(event.text for event in events)
