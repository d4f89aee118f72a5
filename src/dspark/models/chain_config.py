"""What the configurations of Eagle3 and MTP share: one causal draft layer beside a target.

Both are chains: a draft layer runs once per draft token, fed with the state it left at the token before. The layer
comes in the two styles of :mod:`dspark.models.drafter_shape`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from dspark.errors import CheckpointError
from dspark.models.drafter_shape import (
    NEEDED,
    DrafterShape,
    refuse_foreign,
    style_json,
    style_of,
    translated,
    without_defaults,
)

Config = TypeVar("Config", bound="ChainConfig")


@dataclass(frozen=True, kw_only=True)
class ChainConfig(DrafterShape):
    """Shape of a chain drafter; ``block_size`` counts the layer's runs for one proposal."""

    ARCHITECTURES: ClassVar[dict[str, str]]  # by layer style

    @property
    def architecture(self) -> str:
        return self.ARCHITECTURES[self.layer_style]

    def to_json(self) -> dict[str, Any]:
        """``config.json``: every field, and what readers of the style's configs expect beside them."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data = {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}
        data |= {
            "architectures": [self.architecture],
            "num_hidden_layers": 1,
            "layer_types": ["full_attention"],
            **style_json(self),
        }
        return without_defaults(data, self)

    @classmethod
    def from_json(cls: type[Config], data: dict[str, Any]) -> Config:
        """Read ``config.json``. Raises :class:`CheckpointError` on another architecture, a missing field, or a layer
        that this one cannot stand for."""
        style = style_of(data, cls.ARCHITECTURES)
        layers = data.get("draft_num_hidden_layers", data.get("num_hidden_layers", 1))
        if layers != 1:
            raise CheckpointError(f"num_hidden_layers is {layers}; a chain drafter has one layer")
        refuse_foreign(data, style)
        values = cls.read_fields(data)
        values |= translated(data, style, values)
        if missing := sorted(NEEDED - values.keys()):
            raise CheckpointError(
                f"config.json lacks {', '.join(missing)}; it is not a complete {cls.ARCHITECTURES[style]} config"
            )
        return cls(**values)

    @classmethod
    def read_fields(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The constructor's arguments that ``data`` holds under our names."""
        names = {f.name for f in fields(cls)}
        values = {key: value for key, value in data.items() if key in names and value is not None}
        return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
