"""The configuration of DSpark and DFlash: one frozen dataclass, read from and written to DeepSpec's ``config.json``.

The layers come in the two styles of :mod:`dspark.models.drafter_shape`, ``Qwen3DSparkModel`` and
``Gemma4DSparkModel``. DFlash is the same drafter with ``markov_rank`` 0 and no confidence head.

Source: DeepSpec ``deepspec/modeling/dspark/{qwen3,gemma4}/config.py``. We add fields that DeepSpec does not have, all
optional: ``draft_vocab_size`` with the buffer ``d2t`` and ``sample_from_anchor`` (both are speculators' names).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dspark.errors import CheckpointError, ConfigError
from dspark.models.drafter_shape import (
    NEEDED,
    DrafterShape,
    refuse_foreign,
    style_json,
    style_of,
    translated,
    without_defaults,
)
from dspark.models.target import check_taps

ARCHITECTURES = {"qwen3": "Qwen3DSparkModel", "gemma4": "Gemma4DSparkModel"}  # by layer style
HEAD_TYPES = ("vanilla", "gated", "rnn")
REQUIRED = NEEDED | {"mask_token_id"}


@dataclass(frozen=True, kw_only=True)
class DraftConfig(DrafterShape):
    """Shape of a DSpark drafter. ``block_size`` counts drafts in either convention of the anchor's slot."""

    num_hidden_layers: int = 2
    sample_from_anchor: bool = True  # the anchor's slot predicts too; False is z-lab's DFlash: anchor, then gamma masks
    mask_token_id: int = 0  # a token that no answer contains
    target_layer_ids: tuple[int, ...] = ()  # taps, ascending; the last layer is refused
    markov_rank: int = 128  # 0 switches the sequential head off
    markov_head_type: str = "vanilla"  # vanilla | gated | rnn
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_hidden_layers < 1:
            raise ConfigError(f"num_hidden_layers is {self.num_hidden_layers}; it must be 1 or more")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id is {self.mask_token_id}; it must lie in the vocabulary of {self.vocab_size}"
            )
        if not self.target_layer_ids:
            raise ConfigError("target_layer_ids is empty; a drafter needs at least one tapped layer")
        check_taps(self.target_layer_ids, self.num_target_layers)
        if self.markov_rank < 0:
            raise ConfigError(f"markov_rank is {self.markov_rank}; it must be 0 (no sequential head) or more")
        if self.markov_head_type not in HEAD_TYPES:
            raise ConfigError(f"markov_head_type is {self.markov_head_type!r}; supported: {', '.join(HEAD_TYPES)}")

    @property
    def feature_size(self) -> int:
        """Width of one context row: number of taps times the hidden size."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def confidence_inputs(self) -> int:
        return self.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)

    @property
    def block_inputs(self) -> int:
        """Slots that the backbone runs per block: one more where the anchor's predicts nothing."""
        return self.slots(self.block_size)

    def slots(self, block_size: int) -> int:
        """Slots of a block with ``block_size`` predictions."""
        return block_size + (not self.sample_from_anchor)

    def to_json(self) -> dict[str, Any]:
        """``config.json`` in DeepSpec's layout."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data["target_layer_ids"] = list(self.target_layer_ids)
        data |= {
            "architectures": [ARCHITECTURES[self.layer_style]],
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            **style_json(self),
        }
        if self.markov_rank == 0:
            del data["markov_head_type"]
        if not self.enable_confidence_head:
            del data["confidence_head_with_markov"]
        return without_defaults(data, self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DraftConfig:
        """Read DeepSpec's ``config.json``; what the target's config brought along and no drafter reads is passed over.

        Raises :class:`CheckpointError` on another architecture, a missing field, or one that we would compute wrongly.
        """
        style = style_of(data, ARCHITECTURES)
        refuse_foreign(data, style)
        names = {f.name for f in fields(cls)}
        values = {key: value for key, value in data.items() if key in names and value is not None}
        values |= translated(data, style, values)
        values["target_layer_ids"] = tuple(values.get("target_layer_ids") or ())
        values.setdefault("markov_rank", 0)
        if not values.get("enable_confidence_head", False):
            values["enable_confidence_head"] = values["confidence_head_with_markov"] = False
        if missing := sorted(REQUIRED - values.keys()):
            raise CheckpointError(
                f"config.json lacks {', '.join(missing)}; it is not a complete {ARCHITECTURES[style]} config"
            )
        return cls(**values)
