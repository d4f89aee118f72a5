"""From the records of many drafters to figures with intervals, by set, domain and altogether, and their differences.

Everything at one temperature is computed from the answers that all its drafters gave, so that no column of a table has
prompts of its own. A domain's figure is the mean over its sets and the overall figure the mean over all sets, every set
counting alike (the paper's Table 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from dspark.errors import ConfigError, DataError
from dspark.evaluate.figures import StageTimes
from dspark.evaluate.intervals import DRAWS, Estimate, estimate
from dspark.evaluate.records import AnswerRecord, Cell, Key
from dspark.evaluate.scores import Drawn, Scores, mean_scores, set_scores
from dspark.evaluate.suite import KNOWN_SETS
from dspark.evaluate.tally import ratio

OVERALL = "mean"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a drafter did on a set, a domain or everything. Speeds are None where other answers shared the passes."""

    prompts: int
    answers: int
    acceptance_length: Estimate
    committed_per_verified: Estimate
    prefix_acceptance: tuple[Estimate, ...]
    conditional_acceptance: tuple[Estimate, ...]
    tokens_per_second: Estimate | None  # median over conversations
    speedup: Estimate | None  # of tokens_per_second over that of plain decoding, on the same prompts
    round_ms: StageTimes | None  # medians over rounds
    sequential_share: float  # of a round's time, seconds over seconds


@dataclass(frozen=True, kw_only=True)
class DrafterFigures:
    """One drafter at one temperature."""

    label: str
    kind: str  # dspark, dflash, eagle3, mtp, ngram, none, ...
    block_size: int
    sets: dict[str, Figures]
    domains: dict[str, Figures]
    mean: Figures
    left_out: int  # answers that another drafter of the comparison has not given
    identical: tuple[int, int] | None  # first turns equal to plain decoding's, of how many; None when sampled


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One drafter against another on the same prompts; scopes are sets, domains and "mean"."""

    label: str
    against: str
    acceptance_length: dict[str, Estimate]  # by scope: of ``label`` minus of ``against``
    acceptance_ratio: dict[str, Estimate]  # of ``label`` over ``against``
    speed_ratio: dict[str, Estimate] | None


@dataclass(frozen=True, kw_only=True)
class AtTemperature:
    """The comparison at one temperature."""

    temperature: float
    drafters: tuple[DrafterFigures, ...]
    differences: tuple[Difference, ...]
    domain_of: dict[str, str]  # each set's


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All temperatures; intervals have level 0.95 from ``draws`` draws of prompts."""

    temperatures: tuple[AtTemperature, ...]
    draws: int


def compare(cells: Sequence[Cell], *, against: str | None = None, draws: int = DRAWS, seed: int = 0) -> Comparison:
    """Figures of all cells. ``against`` names the drafter that the others are set against; None takes the first that
    drafts.

    Raises :class:`DataError` if there is nothing to compare and :class:`ConfigError` for an unknown ``against`` or
    two cells of one label and temperature.
    """
    if not cells:
        raise DataError("there are no records to compare; `dspark eval` makes them")
    labels = {cell.label for cell in cells}
    if against is not None and against not in labels:
        raise ConfigError(f"against is {against!r}; there are records of {', '.join(sorted(labels))}")
    names = [(cell.label, cell.temperature) for cell in cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            f"{twice[0]} at temperature {twice[1]:g} is there twice; leave one of the folders out, "
            "or let one `dspark eval --out` make all of them"
        )
    groups: dict[float, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.temperature, []).append(cell)
    found = [_at_temperature(group, against=against, draws=draws, seed=seed) for group in groups.values()]
    return Comparison(temperatures=tuple(sorted(found, key=lambda each: each.temperature)), draws=draws)


def common_answers(cells: Sequence[Cell]) -> list[dict[Key, AnswerRecord]]:
    """The answers that all of ``cells`` gave, of each cell, in one order.

    Raises :class:`DataError` if there are none, or if one key stands for different prompts.
    """
    by_key = [{answer.key: answer for answer in cell.answers} for cell in cells]
    shared = reduce(lambda keys, more: [key for key in keys if key in more], by_key, list(by_key[0]))
    shared.sort(key=_paper_first)
    if not shared:
        raise DataError(f"{' and '.join(cell.label for cell in cells)} have no answered prompt in common")
    for key in shared:
        if len({each[key].asked for each in by_key}) > 1:
            raise DataError(f"prompt {key[1]!r} of {key[0]} was asked in different words; evaluate one of them again")
    return [{key: each[key] for key in shared} for each in by_key]


def _paper_first(key: Key) -> tuple[int, Key]:
    """The paper's sets in its order, others behind them."""
    names = list(KNOWN_SETS)
    return names.index(key[0]) if key[0] in names else len(names), key


@dataclass(frozen=True, kw_only=True, eq=False)
class _Group:
    """The cells of one temperature with the scores of every set."""

    cells: Sequence[Cell]
    domains: Mapping[str, list[str]]  # sets of each
    scores: list[dict[str, Scores]] = field(repr=False)  # by cell, by set

    @property
    def plain(self) -> int | None:
        return next((i for i, cell in enumerate(self.cells) if not cell.drafts), None)

    def scopes(self, i: int) -> dict[str, Scores]:
        """Scores of cell ``i`` by set, domain and altogether."""
        sets = self.scores[i]
        means = {domain: mean_scores([sets[name] for name in names]) for domain, names in self.domains.items()}
        # a set that is a domain of its own has one row
        return {**sets, **means, OVERALL: mean_scores(list(sets.values()))}


def _at_temperature(cells: Sequence[Cell], *, against: str | None, draws: int, seed: int) -> AtTemperature:
    answers = common_answers(cells)
    domain_of = {answer.set: answer.domain for answer in answers[0].values()}
    domains: dict[str, list[str]] = {}
    for name, domain in domain_of.items():
        domains.setdefault(domain, []).append(name)
    _check_names(domains, domain_of)
    scores = [
        {
            name: set_scores(
                [a for a in found.values() if a.set == name],
                name,
                block=int(cell.about["facts"]["block_size"]),
                draws=draws,
                seed=seed,
            )
            for name in domain_of
        }
        for cell, found in zip(cells, answers, strict=True)
    ]
    group = _Group(cells=cells, domains=domains, scores=scores)
    scopes = [group.scopes(i) for i in range(len(cells))]
    drafters = [_drafter_figures(group, i, scopes, answers) for i in range(len(cells))]
    return AtTemperature(
        temperature=cells[0].temperature,
        drafters=tuple(drafters),
        differences=tuple(_differences(cells, scopes, against)),
        domain_of=domain_of,
    )


def _check_names(domains: Mapping[str, list[str]], sets: Mapping[str, str]) -> None:
    """Refuse a set that is called like a domain of others: one row of a table would stand for both."""
    for name in sets:
        if name == OVERALL or domains.get(name, [name]) != [name]:
            raise DataError(f"a set is called {name!r}, and so is a mean over others; give it another name, NAME=FILE")


def _estimate(drawn: Drawn, prompts: int) -> Estimate:
    """``prompts`` of the smallest set behind it."""
    return estimate(float(drawn[0]), drawn[1:], prompts=prompts)


def _figures(scores: Scores, plain: Scores | None, *, timed: bool) -> Figures:
    def at(drawn: Drawn) -> Estimate:
        return _estimate(drawn, scores.least_prompts)

    return Figures(
        prompts=scores.prompts,
        answers=scores.answers,
        acceptance_length=at(scores.length),
        committed_per_verified=at(scores.per_verified),
        prefix_acceptance=tuple(at(column) for column in scores.prefix.T),
        conditional_acceptance=tuple(at(column) for column in scores.conditional.T),
        tokens_per_second=at(scores.speed) if timed else None,
        speedup=at(ratio(scores.speed, plain.speed)) if timed and plain is not None else None,
        round_ms=scores.times if timed else None,
        sequential_share=scores.share,
    )


def _drafter_figures(
    group: _Group, i: int, scopes: Sequence[Mapping[str, Scores]], answers: Sequence[Mapping[Key, AnswerRecord]]
) -> DrafterFigures:
    cell, plain = group.cells[i], group.plain
    timed = cell.timed and (plain is None or group.cells[plain].timed)
    figures = {
        name: _figures(scores, None if plain is None else scopes[plain][name], timed=timed)
        for name, scores in scopes[i].items()
    }
    greedy = cell.temperature < 1e-5
    return DrafterFigures(
        label=cell.label,
        kind=cell.about["facts"]["kind"],
        block_size=cell.about["facts"]["block_size"],
        sets={name: figures[name] for name in group.scores[i]},
        domains={name: figures[name] for name in group.domains},
        mean=figures[OVERALL],
        left_out=len(cell.answers) - len(answers[i]),
        identical=_identical(answers[i], answers[plain]) if greedy and plain is not None and plain != i else None,
    )


def _identical(one: Mapping[Key, AnswerRecord], other: Mapping[Key, AnswerRecord]) -> tuple[int, int]:
    """Equal answers among the first turns; later ones may answer to different earlier answers."""
    first = [key for key in one if key[2] == 0]
    return sum(one[key].token_ids == other[key].token_ids for key in first), len(first)


def _differences(
    cells: Sequence[Cell], scopes: Sequence[Mapping[str, Scores]], against: str | None
) -> list[Difference]:
    """Every drafter against the chosen one."""
    drafting = [i for i, cell in enumerate(cells) if cell.drafts]
    named = [i for i, cell in enumerate(cells) if cell.label == against]
    reference = named[0] if named else drafting[0] if drafting else None
    if reference is None:
        return []
    base = scopes[reference]
    found = []
    for i in drafting:
        if i == reference:
            continue
        timed, own = cells[i].timed and cells[reference].timed, scopes[i]

        def over(name: str, own: Mapping[str, Scores] = own) -> dict[str, Estimate]:
            ratios = {scope: ratio(getattr(own[scope], name), getattr(base[scope], name)) for scope in base}
            return {scope: _estimate(drawn, base[scope].least_prompts) for scope, drawn in ratios.items()}

        lengths = {scope: own[scope].length - base[scope].length for scope in base}
        found.append(
            Difference(
                label=cells[i].label,
                against=cells[reference].label,
                acceptance_length={
                    scope: _estimate(drawn, base[scope].least_prompts) for scope, drawn in lengths.items()
                },
                acceptance_ratio=over("length"),
                speed_ratio=over("speed") if timed else None,
            )
        )
    return found
