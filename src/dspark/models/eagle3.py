"""Eagle3: one layer over [embedding of the next token ; state], unrolled over its own states in training.

With u the state of an index i and e the embedding of the token after it, a run of the layer is

    x = [input_layernorm(e) ; hidden_norm(u)]              twice the width, read by q, k and v
    v = u + attention(x);  u' = v + mlp(post_attention_layernorm(v))
    logits of the token after next = head(norm(u'))

The first u is ``fc`` of the target's tapped states; a later one is the u' of the run before, so that drafting writes
one token after the other. Training unrolls the same chain over the answer's own tokens ("training-time test").

Published drafters differ in a few places, each a field of :class:`Eagle3Config`:

| field                | what it changes                                   | whose drafters have it                 |
|----------------------|---------------------------------------------------|----------------------------------------|
| norm_before_residual | v = hidden_norm(u) + attention(x)                 | speculators'                           |
| norm_before_fc       | fc reads input_norm of all taps side by side      | speculators', NVIDIA's for gpt-oss     |
| fc_norm              | fc reads the taps, each through a norm of its own | EAGLE 3.1's (SGLang, vLLM)             |
| norm_output          | a later u is norm(u') instead of u'               | EAGLE 3.1's (SGLang, vLLM)             |
| own_embedding        | e comes from an embedding of the drafter's own    | speculators' with embed_requires_grad  |
| own_head             | logits come from a head of the drafter's own      | all but DeepSpec's                     |
| qk_norm              | False: no norms on q and k, as in Llama's layer   | those of Llama's shape                 |

Source: EAGLE-3 (Li et al. 2025); DeepSpec ``modeling/eagle3``, whose tensor names these are; speculators
``models/eagle3`` and its pull requests 610 and 670; vLLM and SGLang ``llama_eagle3.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dspark.errors import ConfigError
from dspark.models.backbone import RMSNorm, linear
from dspark.models.chain import ChainModel, make_layer
from dspark.models.chain_config import ChainConfig
from dspark.models.target import FINAL, check_taps


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(ChainConfig):
    """Shape of an Eagle3 drafter. DeepSpec calls ``block_size`` ``ttt_length`` in ``config.json``; both are written.

    The defaults are DeepSpec's. ``own_head`` False takes logits from the target's frozen head (its rows of the draft
    vocabulary); True has ``lm_head.weight`` [draft_vocab, hidden] trained. ``own_embedding`` True has
    ``embed_tokens.weight`` [vocab, hidden] trained, as stored: in Gemma's style it is scaled by the root of the width.
    """

    ARCHITECTURES: ClassVar[dict[str, str]] = {"qwen3": "Qwen3Eagle3Model", "gemma4": "Gemma4Eagle3Model"}

    target_layer_ids: tuple[int, ...] = ()  # taps, ascending; the reference takes five
    own_head: bool = False
    own_embedding: bool = False
    qk_norm: bool = True  # gemma4 has them always
    norm_before_residual: bool = False  # the residual stream starts from the normed state
    norm_before_fc: bool = False  # one norm over all taps side by side; not together with fc_norm
    fc_norm: bool = False  # a norm per tap
    norm_output: bool = False  # a step hands on its normed state
    step_loss_decay: float = 0.8  # weight of an unrolled step relative to the one before, in training

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target_layer_ids:
            raise ConfigError("target_layer_ids is empty; a drafter needs at least one tapped layer")
        if FINAL in check_taps(self.target_layer_ids, self.num_target_layers):
            raise ConfigError("target_layer_ids holds the final state; Eagle3 taps decoder layers")
        if not 0 < self.step_loss_decay <= 1:
            raise ConfigError(f"step_loss_decay is {self.step_loss_decay}; it must be in (0, 1]")
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc and fc_norm are both true; taps are normed together or one by one")
        if self.layer_style == "gemma4" and not self.qk_norm:
            raise ConfigError("qk_norm is false; layers of style 'gemma4' norm queries and keys, set it true")

    @property
    def feature_size(self) -> int:
        """Width of one row of features: number of taps times the hidden size."""
        return len(self.target_layer_ids) * self.hidden_size

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"ttt_length": self.block_size, "draft_num_hidden_layers": 1}

    @classmethod
    def read_fields(cls, data: dict[str, Any]) -> dict[str, Any]:
        values = super().read_fields(data)
        if "block_size" not in values and "ttt_length" in data:
            values["block_size"] = data["ttt_length"]
        if "num_target_layers" not in values and "draft_num_hidden_layers" in data and "num_hidden_layers" in data:
            values["num_target_layers"] = data["num_hidden_layers"]  # the rest of the file is the target's config
        return values


class Eagle3Model(ChainModel):
    """All parameters of an Eagle3 drafter under DeepSpec's tensor names; ``input_norm`` and ``fc_norm`` are vLLM's."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, make_layer(config, inputs=2 * width, qk_norm=config.qk_norm, state_norm=True))
        self.fc = nn.Linear(config.feature_size, width, bias=False)
        self.input_norm = RMSNorm(config.feature_size, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in config.target_layer_ids) if config.fc_norm else None
        self.lm_head = nn.Linear(width, config.output_size, bias=False) if config.own_head else None
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def tap_norms(self) -> list[RMSNorm]:
        """``fc_norm`` under its modules' own type; empty without it."""
        return [norm for norm in self.fc_norm or () if isinstance(norm, RMSNorm)]

    def first_state(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows hidden"]:
        """fc . F, of all taps at once, normed before where the drafter norms them."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if norms := self.tap_norms():
            parts = features.split(self.config.hidden_size, 1)
            features = torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], 1)
        return linear(features, self.fc)

    def mix(
        self, embeds: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows hidden"]]:
        """[input_layernorm(e) ; hidden_norm(u)], and the residual: u before its norm, or after."""
        assert self.layer.hidden_norm is not None
        normed = self.layer.hidden_norm(states)
        inputs = torch.cat((self.layer.input_layernorm(embeds), normed), 1)
        return inputs, normed if self.config.norm_before_residual else states

    def next_state(
        self, states: Float[Tensor, "rows hidden"], normed: Float[Tensor, "rows hidden"]
    ) -> Float[Tensor, "rows hidden"]:
        return normed if self.config.norm_output else states

    def own_head(self) -> nn.Linear | None:
        return self.lm_head

    def own_embedding(self) -> nn.Embedding | None:
        return self.embed_tokens
