"""What a training run takes of its device's memory, told before anything is loaded.

The plan does not estimate a step, it runs one: the drafter is built on PyTorch's meta device, whose tensors have shapes
and no bytes, and a pass of the largest size that the configuration allows goes forward and backward through the very
code that trains, while :class:`Allocations` adds up what would be allocated. The rest is arithmetic.

What bounds each part: `chunk` the logits, `blocks_per_pass` the activations, `feature_gigabytes` the features,
`whole_target` the target, `layers`, `draft_vocab` and `markov_rank` the parameters.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark.maths.losses import LossAlphas, SparseTarget, chunked_losses
from dspark.maths.own_head import own_head_losses
from dspark.models.backbone import BlockBatch, DraftModel
from dspark.models.chain import ChainBatch, ChainModel
from dspark.models.draft_config import DraftConfig
from dspark.models.draft_recipes import text_config
from dspark.models.loading import DTYPES
from dspark.models.target import TargetInfo
from dspark.train.config import TrainConfig
from dspark.train.methods import draft_config, make_model, run_taps

LOGIT_ROWS = 128  # of the target's logits at a time, when features are made (dspark.data.features)


class Allocations(TorchDispatchMode):
    """Counts bytes of the tensors that operations make inside the block, backward passes included.

    ``live`` is what exists of them now, ``peak`` the most that did. What a kernel takes for itself is not seen, nor
    what an allocator rounds up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}  # Any: storages have no public type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # as torch calls it
        for tensor in tree_leaves((args, kwargs)):
            self._note(tensor, made_here=False)
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            self._note(tensor, made_here=True)
        self.peak = max(self.peak, self.live)
        return made

    def _note(self, tensor: object, *, made_here: bool) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes() if made_here else 0
        if key not in self._known:
            self._known[key] = weakref.ref(storage, partial(self._forget, key, nbytes))
            self.live += nbytes

    def _forget(self, key: int, nbytes: int, _: object) -> None:
        self.live -= nbytes
        del self._known[key]


@dataclass(frozen=True)
class MemoryItem:
    """One part of the plan."""

    name: str
    nbytes: int
    bound: str  # the fields that make it smaller


@dataclass(frozen=True)
class MemoryPlan:
    """What one process takes at its peak, part by part."""

    items: tuple[MemoryItem, ...]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


def memory_plan(config: TrainConfig, target_config: Any, *, processes: int = 1) -> MemoryPlan:
    """The plan of each process of a run, whatever its method; ``target_config`` is the target's transformers
    configuration (Any, for it has a type per family).

    An upper bound of what tensors take: every sequence is ``max_tokens`` long and supervised, all parts are at their
    largest at once, and attention is the dense form. Not in it: the CUDA context and its libraries (0.3 to 0.6 GB), and
    what the allocator loses to rounding.
    """
    compute = DTYPES.get(config.dtype, torch.bfloat16)  # auto is bfloat16 on a GPU
    shape = draft_config(config, target_config, _info(target_config, compute), max(0, config.mask_token_id))
    with torch.device("meta"):
        model = make_model(config, shape)
    trained = sum(p.numel() for p in model.parameters())
    state = 12 * trained  # masters and two moments; gradients are the step's
    if processes > 1:
        state = 12 * -(-trained // processes) + 4 * trained if config.parallel == "fsdp" else state + 4 * trained
    items = [
        MemoryItem("target", target_bytes(target_config, compute, whole=config.whole_target), "whole_target"),
        MemoryItem("masters and moments", state, "layers, draft_vocab, markov_rank, parallel"),
        MemoryItem(
            "target's head, draft vocabulary", compute.itemsize * shape.output_size * shape.hidden_size, "draft_vocab"
        ),
        MemoryItem("features", int(config.feature_gigabytes * 2**30), "feature_gigabytes"),
        MemoryItem(
            "a step: activations, logits, gradients",
            max(step_bytes(shape, config, size, compute=compute) for size in _sizes(config)),
            "blocks_per_pass, chunk, max_tokens",
        ),
    ]
    text = text_config(target_config)
    if config.whole_target and not config.cache:
        nbytes = _pass_bytes(config, shape, text, compute)
        items.append(MemoryItem("a pass of the target", nbytes, "max_tokens, cache"))
    if config.played_from < 1:
        nbytes = _played_bytes(config, shape, text, compute)
        items.append(MemoryItem("rounds that the drafter plays", nbytes, "played_texts, played_tokens"))
    return MemoryPlan(tuple(items))


def _info(target_config: Any, dtype: torch.dtype) -> TargetInfo:
    text = text_config(target_config)
    return TargetInfo(
        name="",
        family=text.model_type,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        max_len=text.max_position_embeddings,
        dtype=dtype,
        device=torch.device("meta"),
    )


def _token_bytes(config: TrainConfig, shape: DraftConfig, text: Any, dtype: torch.dtype) -> tuple[int, int]:
    """What a token leaves behind in a pass of the target: keys and values of all layers; and its taps."""
    taps = len(run_taps(config, text.num_hidden_layers))
    kv = 2 * text.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    return dtype.itemsize * kv, dtype.itemsize * taps * shape.hidden_size


def _pass_bytes(config: TrainConfig, shape: DraftConfig, text: Any, dtype: torch.dtype) -> int:
    """Of one sample through the target: keys and values of all layers, taps, one layer at work, a part's logits."""
    kv, taps = _token_bytes(config, shape, text, dtype)
    layer = 4 * (4 * text.intermediate_size + 12 * text.hidden_size + shape.num_attention_heads * config.max_tokens)
    return config.max_tokens * (kv + 2 * taps + layer) + LOGIT_ROWS * text.vocab_size * (2 * dtype.itemsize + 4)


def _played_bytes(config: TrainConfig, shape: DraftConfig, text: Any, dtype: torch.dtype) -> int:
    """Of a playing: keys and values of all texts, their features twice (as played, and as read back), a pass's logits
    and probabilities, and the distributions behind the drafts."""
    tokens = min(config.max_tokens + config.played_tokens, text.max_position_embeddings)
    kv, taps = _token_bytes(config, shape, text, dtype)
    kept = 2 * (taps + dtype.itemsize * text.hidden_size)
    rows = config.played_texts * (config.block_size + 1)
    entry = config.block_size * config.target_top * (4 + dtype.itemsize)  # of each token, at most a round
    logits = rows * text.vocab_size * (dtype.itemsize + 4 + (8 if config.played_temperature else 0))
    return config.played_texts * (tokens * (kv + kept) + config.played_tokens * 2 * entry) + logits


def _sizes(config: TrainConfig) -> list[int]:
    """Block sizes of the run, 1 of states included."""
    sizes = {config.block_at(step) for step in range(0, config.steps, max(1, config.steps // 1000))}
    return sorted(sizes | {config.block_at(config.steps - 1), config.block_at(0)})


def step_bytes(shape: DraftConfig, config: TrainConfig, block_size: int, *, compute: torch.dtype) -> int:
    """Most bytes that exist during one pass over blocks of ``block_size``, gradients included, parameters not."""
    states = config.state_steps > 0 and block_size == 1
    wanted = max(config.slots_per_step, config.state_slots if states else 0) // block_size
    blocks = max(1, min(wanted, config.blocks_per_pass or wanted))
    passes = 1 if blocks == wanted else 2  # from the second one on, the gradients of those before exist as well
    sequences = min(config.sequences_per_step, blocks)
    rows = [config.max_tokens - 1] * sequences
    shares = [blocks * (i + 1) // sequences - blocks * i // sequences for i in range(sequences)]
    with torch.device("meta"):
        model = make_model(config, shape)
        head = torch.empty(shape.output_size, shape.hidden_size, dtype=compute)
        taps = shape.feature_size if isinstance(model, DraftModel) else len(model.taps) * shape.hidden_size
        features = torch.empty(sum(rows), taps, dtype=compute)
        anchors = torch.empty(blocks, dtype=torch.long)
        mask = torch.empty(shape.hidden_size, dtype=compute)
    with Allocations() as seen:
        for _ in range(passes):
            # copies, as a step makes them of its samples' features
            if isinstance(model, DraftModel):
                hidden = model(
                    BlockBatch(features.clone(), rows, anchors, shares),
                    mask.expand(blocks, -1).clone(),
                    mask,
                    block_size,
                )
                _meta_loss(model, hidden, head, config).backward()
            else:
                hidden = model(_meta_chains(model, features.clone(), rows, anchors, shares, block_size))
                _meta_chain_loss(model, hidden, head, config).backward()
            del hidden
    return seen.peak


def _meta_chains(
    model: ChainModel, features: Tensor, rows: list[int], starts: Tensor, shares: list[int], block_size: int
) -> ChainBatch:
    """The batch of :func:`dspark.train.chains.chain_batch`; embeddings of the drafter's own carry gradients."""

    def embeds(*shape: int) -> Tensor:
        if model.own_embedding() is not None:
            return model.embed(torch.empty(*shape, dtype=torch.long, device="meta")).to(features.dtype)
        return torch.empty(*shape, model.config.hidden_size, dtype=features.dtype, device="meta").clone()

    nexts, steps = embeds(features.shape[0]), embeds(starts.shape[0], block_size)
    return ChainBatch(features, nexts, rows, starts, steps, shares)


def _meta_chain_loss(model: ChainModel, hidden: Tensor, head: Tensor, config: TrainConfig) -> Tensor:
    """The loss of :func:`dspark.train.chains.run_chains` with every slot supervised."""
    slots = hidden.shape[0] * hidden.shape[1]
    rows = hidden.flatten(0, 1)[torch.empty(slots, dtype=torch.long, device="meta")]
    target, labels, weights = _meta_targets(slots, config)
    alphas, cap, chunk = LossAlphas(), model.config.final_soft_cap, config.chunk
    if (own := model.own_head()) is not None:
        return own_head_losses(rows, own.weight, target, labels, weights, alphas=alphas, soft_cap=cap, chunk=chunk)[0]
    return chunked_losses(rows, None, None, head, target, labels, weights, alphas=alphas, soft_cap=cap, chunk=chunk)[0]


def _meta_targets(slots: int, config: TrainConfig) -> tuple[SparseTarget, Tensor, Tensor]:
    """Distributions, labels and weights of so many slots."""
    target = SparseTarget(
        torch.empty(slots, config.target_top, dtype=torch.long, device="meta"),
        torch.empty(slots, config.target_top, device="meta").clone(),
    )
    return target, torch.empty(slots, dtype=torch.long, device="meta"), torch.empty(slots, device="meta")


def _meta_loss(model: DraftModel, hidden: Tensor, head: Tensor, config: TrainConfig) -> Tensor:
    """The loss of :func:`dspark.train.blocks.run_blocks` with every slot supervised."""
    blocks, size = hidden.shape[:2]
    slots = blocks * size
    prev = torch.empty(blocks, size, dtype=torch.long, device="meta")
    keep = torch.empty(slots, dtype=torch.long, device="meta")
    rows, markov = hidden.flatten(0, 1)[keep], model.markov_head
    latents = None if markov is None else markov.latents(hidden, prev).flatten(0, 1)[keep]
    target, labels, weights = _meta_targets(slots, config)
    loss, found = chunked_losses(
        rows,
        latents,
        None if markov is None else markov.markov_w2.weight,
        head,
        target,
        labels,
        weights,
        alphas=LossAlphas(),
        soft_cap=model.config.final_soft_cap,
        chunk=config.chunk,
    )
    if model.confidence_head is not None:
        inputs = rows
        if markov is not None and model.config.confidence_head_with_markov:
            inputs = torch.cat((rows, markov.embed(prev).flatten(0, 1)[keep].to(rows.dtype)), 1)
        inputs = inputs.detach() if config.confidence_detach else inputs
        logits = model.confidence_head(inputs.to(torch.promote_types(inputs.dtype, torch.float32)))
        loss = loss + nn.functional.binary_cross_entropy_with_logits(logits, found.acceptance_rate.to(logits.dtype))
    return loss


def target_bytes(target_config: Any, dtype: torch.dtype, *, whole: bool) -> int:
    """Bytes of the target's weights: of all of them, or of its embedding and head alone."""
    from transformers import AutoModelForCausalLM  # slow to import

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(target_config)
    if whole:
        return dtype.itemsize * sum(p.numel() for p in model.parameters())
    parts: list[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    parameters = {id(p): p for part in parts if part is not None for p in part.parameters()}
    return dtype.itemsize * sum(p.numel() for p in parameters.values())
