"""The rounds of a run's second phase on disk, so that a killed run goes on with those that it had.

Rounds are played with the drafter as it stands at some step, and then serve ``played_steps`` steps. A run that resumes
between two playings has another drafter by then and could not play them again, so every playing is a file of the run's
folder, `played/<step>.safetensors`, written before its first step. All processes of a run read the file that the first
one wrote. What a step takes of it is a function of (seed, step), as everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dspark.artifacts import atomic_write_bytes
from dspark.data.anchors import Blocks
from dspark.data.features import Sample, SampleFeatures
from dspark.errors import CheckpointError
from dspark.train.config import TrainConfig
from dspark.train.rounds import PlayedText
from dspark.train.slots import Piece

FOLDER = "played"


@dataclass(frozen=True)
class PlayedRounds:
    """One playing. It is also where steps find its features."""

    step: int  # at which it was played
    texts: tuple[PlayedText, ...]
    _features: dict[str, SampleFeatures] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_features", {text.sample.id: text.features for text in self.texts})

    def get(self, sample: Sample) -> SampleFeatures:
        return self._features[sample.id]

    def serves(self, train_step: int, config: TrainConfig) -> bool:
        """Whether a step is one of those that these rounds were played for."""
        return self.step <= train_step < self.step + config.played_steps

    @property
    def rounds(self) -> int:
        return sum(text.blocks.anchors.shape[0] for text in self.texts)

    def figures(self) -> dict[str, int | float]:
        """For the log: texts, rounds, and the tokens that a round committed, bonus included."""
        committed = sum(text.committed for text in self.texts)
        return {"texts": len(self.texts), "rounds": self.rounds, "acceptance_length": committed / max(1, self.rounds)}


def played_pieces(
    played: PlayedRounds, config: TrainConfig, train_step: int, generator: torch.Generator
) -> list[Piece]:
    """Rounds of a step, as many as its slots allow, drawn without replacement over all texts; whole texts at a time
    would give a step few contexts."""
    size = config.block_at(train_step)
    count = max(1, config.slots_at(train_step) // size)
    picked = torch.randperm(played.rounds, generator=generator)[:count].sort().values
    pieces, first = [], 0
    for text in played.texts:
        blocks = text.blocks
        mine = picked[(picked >= first) & (picked < first + blocks.anchors.shape[0])] - first
        first += blocks.anchors.shape[0]
        if mine.shape[0]:
            pieces.append((text.sample, _pick(blocks, mine, size)))
    return pieces


def _pick(blocks: Blocks, which: Tensor, size: int) -> Blocks:
    assert blocks.worth is not None and blocks.rows is not None
    tensors = (blocks.prev_ids, blocks.labels, blocks.supervised, blocks.worth, blocks.rows)
    return Blocks(blocks.anchors[which], *(t[which, :size] for t in tensors))


def _tensors(text: PlayedText) -> dict[str, Tensor]:
    blocks, kept = text.blocks, text.features
    assert blocks.worth is not None and blocks.rows is not None
    return {
        "token_ids": text.sample.token_ids,
        "loss_mask": text.sample.loss_mask,
        "features": kept.features,
        "top_ids": kept.top_ids,
        "top_probs": kept.top_probs,
        "states": kept.states,
        "anchors": blocks.anchors,
        "prev_ids": blocks.prev_ids,
        "labels": blocks.labels,
        "supervised": blocks.supervised,
        "worth": blocks.worth,
        "rows": blocks.rows,
    }


def write_played(run: Path, step: int, texts: Sequence[PlayedText]) -> None:
    """Keep the rounds that were played at ``step``."""
    tensors: dict[str, Tensor] = {}
    names: list[list[str | int]] = []
    for i, text in enumerate(texts):
        tensors |= {f"{i}/{name}": tensor.cpu().contiguous() for name, tensor in _tensors(text).items()}
        names.append([text.sample.id, text.sample.domain, text.features.start, text.committed])
    atomic_write_bytes(_path(run, step), save(tensors, metadata={"texts": json.dumps(names)}))


def read_played(run: Path, step: int, device: torch.device) -> PlayedRounds:
    """The rounds played at ``step``. Raises :class:`CheckpointError` if their file is damaged."""
    path = _path(run, step)
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            names = json.loads(file.metadata()["texts"])
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete it, and the run plays its rounds again") from None
    texts = []
    for i, (name, domain, start, committed) in enumerate(names):
        part = {key.partition("/")[2]: value for key, value in found.items() if key.partition("/")[0] == str(i)}
        texts.append(_text(part, name, domain, start, committed, device))
    return PlayedRounds(step, tuple(texts))


def _text(
    part: Mapping[str, Tensor], name: str, domain: str, start: int, committed: int, device: torch.device
) -> PlayedText:
    names = ("anchors", "prev_ids", "labels", "supervised", "worth", "rows")
    top_ids, top_probs, states = (part[key].to(device) for key in ("top_ids", "top_probs", "states"))
    return PlayedText(
        Sample(name, domain, part["token_ids"], part["loss_mask"]),
        SampleFeatures(part["features"].to(device), start, top_ids, top_probs, states),
        Blocks(*(part[key] for key in names)),
        committed,
    )


def played_for(run: Path, train_step: int, config: TrainConfig) -> int | None:
    """The step of the playing on disk that serves ``train_step``; None if there is none."""
    steps = [step for step in _steps(run) if step <= train_step < step + config.played_steps]
    return max(steps, default=None)


def keep_played(run: Path, *, first: int, last: int) -> None:
    """Delete playings but those of the steps ``first`` to ``last``."""
    for step in _steps(run):
        if not first <= step <= last:
            _path(run, step).unlink(missing_ok=True)


def _steps(run: Path) -> list[int]:
    return sorted(int(path.stem) for path in (run / FOLDER).glob("*.safetensors") if path.stem.isdigit())


def _path(run: Path, step: int) -> Path:
    return run / FOLDER / f"{step:08d}.safetensors"
