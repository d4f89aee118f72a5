"""What a training method is: the one protocol through which a run and its steps know the drafter that they train.

| method         | module       | trained on                                              |
|----------------|--------------|---------------------------------------------------------|
| dspark, dflash | DraftModel   | blocks, one parallel pass (:mod:`dspark.train.blocks`)  |
| eagle3         | Eagle3Model  | chains, unrolled (:mod:`dspark.train.chains`)           |
| mtp            | MTPModel     | chains, by default of one step                          |

DFlash is DSpark without heads. All methods train on the same blocks of the same samples, so their analytic acceptance
lengths on held-out answers compare: tokens expected per round at temperature 1, given prefixes that the answers teach.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dspark.data.anchors import Blocks
from dspark.data.features import Sample
from dspark.data.samples import bigram_pairs
from dspark.maths.losses import LossAlphas
from dspark.models.backbone import DraftModel
from dspark.models.chain import ChainModel
from dspark.models.chain_config import ChainConfig
from dspark.models.draft_config import DraftConfig
from dspark.models.draft_recipes import default_taps, for_target
from dspark.models.drafter import Drafter
from dspark.models.dspark import DsparkDrafter
from dspark.models.eagle3 import Eagle3Config, Eagle3Model
from dspark.models.eagle3_drafter import Eagle3Drafter
from dspark.models.initialise import fit_bigram, fresh, from_target
from dspark.models.initialise_chain import chain_from_target
from dspark.models.mtp import MTPConfig, MTPModel
from dspark.models.mtp_drafter import MTPDrafter
from dspark.models.target import FINAL, Target, TargetInfo
from dspark.train.blocks import Shared, make_shared, run_blocks, run_states
from dspark.train.chains import chain_decay, run_chain_states, run_chains, startable
from dspark.train.config import CHAINS, EAGLE3_OPTIONS, TrainConfig
from dspark.train.slots import FrozenHead, Part, StepNumbers, Totals, block_weights, freeze_head, make_totals


@runtime_checkable
class Method(Protocol):
    """A drafter in training.

    Life: made with random parameters, given its draft vocabulary and maybe restored, then :meth:`bind`; from there on
    the vocabulary is fixed. :meth:`start` follows only if nothing was restored.
    """

    @property
    def model(self) -> nn.Module:
        """The parameters, and the buffer ``d2t`` where the vocabulary is reduced; what a checkpoint holds."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """States of the target that features consist of."""
        ...

    def draft_token_ids(self) -> Int[Tensor, "draft_vocab"]:
        """Target id of every draft id, ascending."""
        ...

    def bind(self, target: Target) -> None:
        """Read the frozen parts of the target that steps need."""
        ...

    def start(self, tensors: dict[str, Tensor] | None, samples: Sequence[Sample]) -> dict[str, float]:
        """The parameters before the first step, from the target's ``tensors`` (None leaves the random start) and what
        the samples show without a backbone; returns figures for the log."""
        ...

    def usable(self, blocks: Blocks) -> Blocks:
        """Those of ``blocks`` that the method can be trained on."""
        ...

    def totals(self, blocks: Sequence[Blocks]) -> Totals:
        """What the means of a step divide by that has these usable blocks."""
        ...

    def numbers(
        self, parts: Sequence[Part], *, block_size: int, alphas: LossAlphas, totals: Totals | None = None
    ) -> StepNumbers:
        """Loss and figures of one pass over blocks of ``block_size``; by default the pass is the whole step."""
        ...

    def state_numbers(self, parts: Sequence[Part], totals: Totals | None = None) -> StepNumbers:
        """Loss of one pass that regresses the target's final state at the anchors; the blocks have one slot."""
        ...

    def drafter(self) -> Drafter:
        """The decoding form of the parameters as they stand."""
        ...

    def twin(self) -> Method:
        """The same method over a copy of the parameters."""
        ...


def make_method(config: TrainConfig, target_config: Any, info: TargetInfo, *, mask_token_id: int) -> Method:
    """The method that ``config`` names, its parameters at the random start; ``target_config`` is the target's
    transformers configuration. ``mask_token_id`` serves dspark and dflash."""
    draft = draft_config(config, target_config, info, mask_token_id)
    return ChainMethod(config, draft) if config.drafter in CHAINS else BlockMethod(config, draft)


def draft_config(config: TrainConfig, target_config: Any, info: TargetInfo, mask_token_id: int) -> DraftConfig:
    """The shape of a dspark or dflash drafter: the target's, and what the run's configuration says."""
    return for_target(
        target_config,
        mask_token_id=mask_token_id,
        vocab_size=info.vocab_size,
        max_position_embeddings=info.max_len,
        num_hidden_layers=config.layers,
        block_size=config.block_size,
        target_layer_ids=config.taps or default_taps(info.num_layers, config.num_taps),
        markov_rank=config.markov_rank,
        markov_head_type=config.markov_head,
        enable_confidence_head=config.confidence,
        sample_from_anchor=config.sample_from_anchor,
        draft_vocab_size=config.draft_vocab if 0 < config.draft_vocab < info.vocab_size else None,
    )


def make_model(config: TrainConfig, draft: DraftConfig) -> DraftModel | ChainModel:
    """The drafter of a run, its parameters not set yet. ``draft`` gives the shape, which a chain shares with a block
    drafter for the same target."""
    if config.drafter not in CHAINS:
        return DraftModel(draft)
    shape = {f.name: getattr(draft, f.name) for f in fields(ChainConfig)}
    if config.drafter == "mtp":
        return MTPModel(MTPConfig(**shape))
    taps, decay = draft.target_layer_ids, config.step_loss_decay
    options = {name: getattr(config, name) for name in EAGLE3_OPTIONS}
    return Eagle3Model(Eagle3Config(**shape, target_layer_ids=taps, step_loss_decay=decay, **options))


def run_taps(config: TrainConfig, num_layers: int) -> tuple[int, ...]:
    """Taps of the drafter that a run trains."""
    return (FINAL,) if config.drafter == "mtp" else config.taps or default_taps(num_layers, config.num_taps)


class BlockMethod:
    """DSpark, and DFlash as DSpark without its heads."""

    def __init__(self, config: TrainConfig, draft: DraftConfig) -> None:
        model = make_model(config, draft)
        assert isinstance(model, DraftModel)
        self.config, self.model = config, model
        fresh(self.model, seed=config.seed)
        self._shared: Shared | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.model.config.target_layer_ids

    def draft_token_ids(self) -> Int[Tensor, "draft_vocab"]:
        return self.model.draft_token_ids()

    @property
    def shared(self) -> Shared:
        assert self._shared is not None, "bind comes first"
        return self._shared

    def bind(self, target: Target) -> None:
        self._shared = make_shared(target, self.model, target.info.dtype)

    def start(self, tensors: dict[str, Tensor] | None, samples: Sequence[Sample]) -> dict[str, float]:
        """Layers, ``fc`` and norms from the target; the Markov head from the answers' bigrams."""
        if tensors is not None:
            from_target(self.model, tensors)
        if self.config.bigram_passes <= 0 or self.model.markov_head is None:
            return {}
        previous, following = bigram_pairs(samples)
        labels = self.shared.to_draft.cpu()[following]
        passes, dtype = self.config.bigram_passes, self.shared.dtype
        return {"bigram_nats": fit_bigram(self.model, previous, labels, passes=passes, dtype=dtype)}

    def usable(self, blocks: Blocks) -> Blocks:
        return blocks

    def totals(self, blocks: Sequence[Blocks]) -> Totals:
        return make_totals(block_weights(blocks, self.config.loss_decay))

    def numbers(
        self, parts: Sequence[Part], *, block_size: int, alphas: LossAlphas, totals: Totals | None = None
    ) -> StepNumbers:
        return run_blocks(
            self.model, self.shared, parts, self.config, block_size=block_size, alphas=alphas, totals=totals
        )

    def state_numbers(self, parts: Sequence[Part], totals: Totals | None = None) -> StepNumbers:
        return run_states(self.model, self.shared, parts, totals)

    def drafter(self) -> Drafter:
        return DsparkDrafter(self.model, self.shared.target, name=self.config.drafter)

    def twin(self) -> BlockMethod:
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        return other


class ChainMethod:
    """Eagle3 and MTP."""

    def __init__(self, config: TrainConfig, draft: DraftConfig) -> None:
        model = make_model(config, draft)
        assert isinstance(model, ChainModel)
        self.config, self.model = config, model
        fresh(self.model, seed=config.seed)
        self._frozen: FrozenHead | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.model.taps

    def draft_token_ids(self) -> Int[Tensor, "draft_vocab"]:
        return self.model.draft_token_ids()

    @property
    def frozen(self) -> FrozenHead:
        assert self._frozen is not None, "bind comes first"
        return self._frozen

    def bind(self, target: Target) -> None:
        self._frozen = freeze_head(target, self.model.draft_token_ids(), target.info.dtype)

    def start(self, tensors: dict[str, Tensor] | None, samples: Sequence[Sample]) -> dict[str, float]:
        """The layer from the target's last one, and a head and embedding of its own from the target's; samples show
        nothing."""
        if tensors is not None:
            chain_from_target(self.model, tensors)
            if (own := self.model.own_head()) is not None:
                own.weight.data.copy_(self.frozen.head)
            if (embedding := self.model.own_embedding()) is not None:
                ids = torch.arange(embedding.num_embeddings, device=self.frozen.head.device)
                embedding.weight.data.copy_(self.frozen.target.embed(ids) / self.model.embedding_scale)
        return {}

    def usable(self, blocks: Blocks) -> Blocks:
        return startable(blocks)

    def totals(self, blocks: Sequence[Blocks]) -> Totals:
        return make_totals(block_weights(blocks, chain_decay(self.config)))

    def numbers(
        self, parts: Sequence[Part], *, block_size: int, alphas: LossAlphas, totals: Totals | None = None
    ) -> StepNumbers:
        return run_chains(
            self.model, self.frozen, parts, self.config, block_size=block_size, alphas=alphas, totals=totals
        )

    def state_numbers(self, parts: Sequence[Part], totals: Totals | None = None) -> StepNumbers:
        return run_chain_states(self.model, self.frozen, parts, totals)

    def drafter(self) -> Drafter:
        target = self.frozen.target
        if isinstance(self.model, MTPModel):
            return MTPDrafter(self.model, target)
        assert isinstance(self.model, Eagle3Model)
        return Eagle3Drafter(self.model, target)

    def twin(self) -> ChainMethod:
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        return other
