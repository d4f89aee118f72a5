"""The run folder: whose it is, and its log.

A folder belongs to one configuration on one set of data; only what :data:`FREE_FIELDS` names may change when a run goes
on. `config.json` keeps the configuration that holds now, and the provenance of every call.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from dspark.artifacts import atomic_write_text, provenance, write_json
from dspark.errors import ConfigError
from dspark.models.loading import choose_device, choose_dtype
from dspark.numbers import json_data
from dspark.train.config import TrainConfig

FREE_FIELDS = frozenset(  # what a resumed run may change: its length, what watches it, and how its steps are cut up
    {
        "out",
        "steps",
        "decay",
        "log_every",
        "evaluate_every",
        "evaluate_prompts",
        "evaluate_tokens",
        "patience",
        "save_seconds",
        "feature_gigabytes",
        "whole_target",
        "parallel",
        "blocks_per_pass",
    }
)


_DEFAULTS = json.loads(json.dumps({f.name: f.default for f in fields(TrainConfig)}))


def settle_dtype(config: TrainConfig) -> TrainConfig:
    """``config`` with its dtype named: that of the folder's run, or else the one that is faster here.

    A measurement may come out otherwise on a busy day; a resumed run keeps the dtype that it began with.
    """
    if config.dtype != "auto":
        return config
    path = Path(config.out) / "config.json"
    if path.is_file() and any(Path(config.out).glob("state-*")):
        return replace(config, dtype=json.loads(path.read_text())["config"]["dtype"])
    return replace(config, dtype=str(choose_dtype("auto", choose_device("auto"))).removeprefix("torch."))


def claim(folder: Path, config: TrainConfig, *, processes: int = 1) -> None:
    """Write the run's config, or check that the folder's run has the same one on the same data.

    A run that goes on writes the config that holds from now on, and adds the call to ``calls``. Raises
    :class:`ConfigError` naming the fields and files that differ.
    """
    path = folder / "config.json"
    ours = json.loads(json.dumps(asdict(config)))
    data = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in (*config.answers, *config.prompts)}
    calls: list[dict[str, Any]] = []
    if path.is_file() and any(folder.glob("state-*")):
        before = json.loads(path.read_text())
        calls = before["calls"]
        then = {**_DEFAULTS, **before["config"]}  # a field that the run's version did not know stood at its default
        changed = sorted(k for k in ours if k not in FREE_FIELDS and then.get(k) != ours[k])
        changed += sorted(name for name in data if before["data"].get(name) != data[name])
        if changed:
            raise ConfigError(
                f"{folder} holds a run that differs in {', '.join(changed)}; resume it unchanged or take another --out"
            )
    folder.mkdir(parents=True, exist_ok=True)
    calls = [*calls, {"steps": config.steps, "processes": processes, "provenance": provenance()}]
    write_json(path, {"config": ours, "data": data, "calls": calls})


def cut_log(folder: Path, step: int) -> None:
    """Drop the lines of steps that were logged but not saved: they will be run and logged again."""
    path = folder / "log.jsonl"
    if path.is_file():
        kept = [text for text in path.read_text().split("\n") if _belongs(text, step)]
        atomic_write_text(path, "".join(text + "\n" for text in kept))


def _belongs(text: str, step: int) -> bool:
    """Whether a line was logged by ``step``; not where it is empty, or torn by a kill."""
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return False
    return isinstance(line, dict) and line.get("step", 0) <= step


def log(folder: Path, line: dict[str, Any]) -> None:
    """Append a line to the log; a figure that there is none of (nan) is null."""
    with open(folder / "log.jsonl", "a") as file:
        file.write(json.dumps(json_data(line), allow_nan=False) + "\n")
