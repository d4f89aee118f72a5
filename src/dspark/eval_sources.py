"""Where an evaluation's conversations come from: files, folders of files, and sets on the Hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.data.prompts import prompt_of, read_hub, read_prompts
from dspark.errors import ConfigError, DataError
from dspark.evaluate.suite import KNOWN_SETS, Conversation, chosen, domain_of, hub_row

MOST_HUB_ROWS = 2000  # of a Hub data set, before it is shuffled
ReadHub = Callable[..., Iterator[dict[str, Any]]]


def read_sets(
    sources: Sequence[str], *, limit: int | None, seed: int, hub: ReadHub = read_hub
) -> dict[str, list[Conversation]]:
    """The sets that ``sources`` name, each shuffled by ``seed`` and cut to ``limit``; by name, in the order given.

    A source is a JSONL file (its set is called like the file), a folder of such files, one of the paper's nine sets by
    name, or a Hub data set ``owner/name[:config][@split]``; ``NAME=SOURCE`` calls a set otherwise. Raises
    :class:`ConfigError` for a source that is none of these and for two sets of one name, and :class:`DataError` for a
    set without prompts.
    """
    found: dict[str, list[Conversation]] = {}
    for source in sources:
        for name, prompts in _read(source, hub):
            if name in found:
                raise ConfigError(f"two sets are called {name!r}; name one of them otherwise, NAME={source}")
            rows = [_conversation(name, prompt) for prompt in prompts]
            if not rows:
                raise DataError(f"{source}: no prompts inside")
            found[name] = chosen(rows, limit=limit, seed=seed)
    if not found:
        raise ConfigError("prompts is empty; name files, a folder, or sets of the paper with --prompts")
    return found


def _read(source: str, hub: ReadHub) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Sets of one source, by name."""
    given, _, rest = source.partition("=")
    name, place = (given, rest) if rest else ("", source)
    path = Path(place)
    if path.is_file():
        yield name or path.stem, list(read_prompts([path]).values())
    elif path.is_dir():
        files = sorted(path.glob("*.jsonl"), key=_paper_first)
        if name or not files:
            raise ConfigError(f"{place} is a folder; " + ("it has no *.jsonl" if not files else "give it no name"))
        for file in files:
            yield file.stem, list(read_prompts([file]).values())
    elif place in KNOWN_SETS:
        yield name or place, _known(place, hub)
    elif "/" in place and path.suffix != ".jsonl":
        address, _, split = place.partition("@")
        rows = hub(address, split=split or "train", limit=MOST_HUB_ROWS)
        yield name or address.partition(":")[0].rpartition("/")[2], [prompt_of(row) for row in rows]
    else:
        raise ConfigError(
            f"prompts is {place!r}, which is no file, no folder, no Hub data set (owner/name) and none of the paper's "
            f"sets ({', '.join(KNOWN_SETS)})"
        )


def _paper_first(file: Path) -> tuple[int, str]:
    """The paper's sets in its order, others behind them."""
    names = list(KNOWN_SETS)
    return (names.index(file.stem) if file.stem in names else len(names)), file.stem


def _known(name: str, hub: ReadHub) -> list[Mapping[str, Any]]:
    """One of the nine sets from the Hub, numbered in its order there, at most as many as the reference takes."""
    known = KNOWN_SETS[name]
    rows = hub(known.hub, split=known.split, limit=MOST_HUB_ROWS)
    prompts = [prompt_of({**hub_row(known, row), "id": f"{name}-{i:04d}"}) for i, row in enumerate(rows)]
    everything = [_conversation(name, prompt) for prompt in prompts]
    kept = {each.id for each in chosen(everything, limit=known.cap, seed=0)}
    return [prompt for prompt in prompts if prompt["id"] in kept]


def _conversation(name: str, prompt: Mapping[str, Any]) -> Conversation:
    return Conversation(
        set_name=name,
        domain=domain_of(name, prompt),
        id=prompt["id"],
        turns=tuple(prompt["turns"]),
        system=prompt.get("system"),
    )
