"""The load bench as a command: its options, its servers, its table and its file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dspark.artifacts import provenance, write_json
from dspark.errors import ConfigError
from dspark.evaluate.bench import prompts_of, read_prompts
from dspark.evaluate.demo_prompts import PROMPTS
from dspark.loadbench.figures import LoadFigures
from dspark.loadbench.measure import LoadConfig, measure
from dspark.loadbench.pattern import Pattern
from dspark.loadbench.servers import Served, started
from dspark.loadbench.ways import ratios, read_levels, read_peer, read_ways
from dspark.numbers import number_text

BASE = "none"  # the way that others are compared with
KEY_VARIABLE = "DSPARK_PEER_API_KEY"


@dataclass(frozen=True, kw_only=True)
class LoadBenchOptions:
    """What the command was given; see its help for the fields."""

    model: str
    drafter: str
    dtype: str
    threads: int | None
    ways: str
    peers: tuple[str, ...]
    levels: str
    rates: str
    prompts: tuple[Path, ...]
    limit: int | None
    max_new_tokens: int
    per_user: int
    least: int
    repeats: int
    temperature: float
    seed: int
    server_options: tuple[str, ...]

    def config(self) -> LoadConfig:
        """The measurements asked for."""
        chosen = read_prompts(self.prompts, limit=self.limit) if self.prompts else prompts_of(PROMPTS, limit=self.limit)
        patterns = [Pattern(kind="closed", level=level) for level in read_levels(self.levels, name="levels")]
        patterns += [Pattern(kind="open", level=rate) for rate in read_levels(self.rates, name="rates")]
        return LoadConfig(
            patterns=tuple(patterns),
            texts=tuple(prompt.text for prompt in chosen),
            max_tokens=self.max_new_tokens,
            per_user=self.per_user,
            least=self.least,
            repeats=self.repeats,
            temperature=self.temperature,
            seed=self.seed,
        )

    def serve_options(self, way: list[str]) -> list[str]:
        """The options of ``dspark serve`` for one way, whose own ones come last and win."""
        further: list[str] = []
        for text in self.server_options:
            name, equals, value = text.partition("=")
            further += [f"--{name}", value] if equals else [f"--{name}"]
        threads = [] if self.threads is None else ["--threads", str(self.threads)]
        drafter = [] if "--drafter" in way else ["--drafter", self.drafter]
        return [self.model, *drafter, "--dtype", self.dtype, *threads, *further, *way]


def bench_serve(options: LoadBenchOptions, *, json_file: Path | None) -> None:
    """Start the servers, measure, print a table, write the file. Raises :class:`ConfigError` before anything starts if
    an option is wrong."""
    config, ways = options.config(), read_ways(options.ways)
    out = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as stack:
        peers = [read_peer(text, api_key=os.environ.get(KEY_VARIABLE)) for text in options.peers]
        names = [name for name, _ in ways] + [peer.way.name for peer in peers]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"ways are {', '.join(names) or 'none'}; at least one, and no name twice")
        served: list[Served] = []
        for name, way in ways:
            out.print(f"{name}: starting")
            served.append(stack.enter_context(started(name, options.serve_options(way))))
            served[-1].pause()
        found: list[LoadFigures] = []
        for figures in measure([*served, *peers], config, told=out.print):
            found.append(figures)
    Console(highlight=False).print(table(found))
    if json_file is not None:
        data = {
            "kind": "load",
            "version": 1,
            "options": {key: _plain(value) for key, value in asdict(options).items()},
            "figures": [figures.data() for figures in found],
            "provenance": provenance(),
        }
        write_json(json_file, data)


def table(found: Sequence[LoadFigures]) -> Table:
    """A row per level and way, with the throughput beside that of :data:`BASE` at the same level."""
    shown = Table(box=None, pad_edge=False)
    for title in ("load", "server"):
        shown.add_column(title)
    for title in ("tok/s", f"/ {BASE}", "user tok/s", "p10", "first s", "p90", "p99", "verified", "accepted", "lost"):
        shown.add_column(title, justify="right")
    for key in dict.fromkeys((row.pattern, row.level) for row in found):
        rows = [row for row in found if (row.pattern, row.level) == key]
        beside = ratios([(row.way, row.tokens_per_second) for row in rows], BASE)
        for row in rows:
            numbers = (
                (row.tokens_per_second, 1),
                (beside.get(row.way, float("nan")), 2),
                (row.user_tokens_per_second, 1),
                (row.user_tokens_per_second_p10, 1),
                (row.first_token_p50, 2),
                (row.first_token_p90, 2),
                (row.first_token_p99, 2),
                (row.verified_per_step, 1),
                (row.accepted_per_step, 1),
            )
            shown.add_row(
                Pattern(kind=row.pattern, level=row.level).title,  # type: ignore[arg-type]
                row.way,
                *(number_text(value, f".{digits}f") for value, digits in numbers),
                str(row.refused + row.failed),
            )
    return shown


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return str(value) if isinstance(value, Path) else value
