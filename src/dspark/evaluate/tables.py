"""A comparison as tables of text: for the terminal, for Markdown, and (as data) for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.evaluate.comparison import OVERALL, AtTemperature, Comparison, Figures
from dspark.evaluate.figures import plain_data
from dspark.evaluate.intervals import Estimate
from dspark.numbers import DASH, number_text

WITH_INTERVALS = 4  # most drafters side by side whose intervals a terminal has room for


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table whose cells are text; the first column names the row."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    overview: bool = False  # the first to be looked at


def shown(estimate: Estimate | None, digits: int = 2, *, sign: bool = False) -> str:
    """``2.13 [2.01, 2.25]``; a dash where there is no figure."""
    if estimate is None or math.isnan(estimate.value):
        return DASH
    form = f"{'+' if sign else ''}.{digits}f"
    value = format(estimate.value, form)
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{format(estimate.low, form)}, {format(estimate.high, form)}]"


def tables(comparison: Comparison) -> list[TextTable]:
    """Every table of a comparison: overview, sets, positions and differences of each temperature."""
    found = []
    for each in comparison.temperatures:
        found += [_overview(each), _sets(each), *_positions(each), *_differences(each)]
    return found


def temperature_name(temperature: float) -> str:
    """As titles have it."""
    return "greedy" if temperature < 1e-5 else f"temperature {temperature:g}"


def _overview(at: AtTemperature) -> TextTable:
    """A row per drafter: acceptance by domain and altogether, and speeds."""
    domains = list(at.drafters[0].domains)
    several = len(domains) > 1
    head = ("drafter", *(domains if several else ()), "accepted", "per verified", "tokens/s", "speedup", "round ms")
    rows = []
    for drafter in at.drafters:
        mean = drafter.mean
        times = mean.round_ms
        rows.append(
            (
                drafter.label,
                *(f"{drafter.domains[name].acceptance_length.value:.2f}" for name in domains if several),
                shown(mean.acceptance_length),
                f"{mean.committed_per_verified.value:.3f}",
                "-" if mean.tokens_per_second is None else f"{mean.tokens_per_second.value:.1f}",
                shown(mean.speedup) if drafter.block_size else "1",
                "-" if times is None else f"{times.draft + times.sequential:.1f} + {times.verify:.1f}",
            )
        )
    count = at.drafters[0].mean.prompts
    same = [f"{d.label} {d.identical[0]} of {d.identical[1]}" for d in at.drafters if d.identical]
    left = [f"{d.label} {d.left_out}" for d in at.drafters if d.left_out]
    note = f"{count} prompts, the same for all; accepted: tokens per round, bonus included; round: draft + verify."
    note += f" First answers equal to plain decoding's: {', '.join(same)}." if same else ""
    note += f" Answers left out because another drafter lacks them: {', '.join(left)}." if left else ""
    return TextTable(
        title=f"{temperature_name(at.temperature)}: all sets", head=head, rows=tuple(rows), note=note, overview=True
    )


def _sets(at: AtTemperature) -> TextTable:
    """A row per set, a column per drafter: acceptance lengths, with intervals where there is room for them."""
    drafting = [drafter for drafter in at.drafters if drafter.block_size] or list(at.drafters)

    def form(figures: Figures) -> str:
        length = figures.acceptance_length
        return shown(length) if len(drafting) <= WITH_INTERVALS else f"{length.value:.2f}"

    scopes: list[tuple[str, str]] = []
    for domain in at.drafters[0].domains:
        members = [name for name, of in at.domain_of.items() if of == domain]
        scopes += [(name, "sets") for name in members]
        scopes += [(domain, "domains")] if members != [domain] else []
    rows = []
    for name, kind in scopes:
        figures: list[Figures] = [getattr(drafter, kind)[name] for drafter in drafting]
        label = name if kind == "sets" else f"= {name}"
        rows.append((label, str(figures[0].prompts), *(form(each) for each in figures)))
    rows.append(("= all", str(drafting[0].mean.prompts), *(form(each.mean) for each in drafting)))
    head = ("set", "prompts", *(drafter.label for drafter in drafting))
    return TextTable(title=f"{temperature_name(at.temperature)}: acceptance length", head=head, rows=tuple(rows))


def _positions(at: AtTemperature) -> list[TextTable]:
    """Conditional and prefix acceptance by position, mean over sets."""
    drafting = [drafter for drafter in at.drafters if drafter.block_size]
    if not drafting:
        return []
    longest = max(drafter.block_size for drafter in drafting)
    head = ("drafter", *(str(k + 1) for k in range(longest)))

    def rows(name: str) -> tuple[tuple[str, ...], ...]:
        return tuple((d.label, *_row(getattr(d.mean, name), longest)) for d in drafting)

    title = f"{temperature_name(at.temperature)}: {{}} acceptance by position"
    return [
        TextTable(title=title.format("conditional"), head=head, rows=rows("conditional_acceptance")),
        TextTable(title=title.format("prefix"), head=head, rows=rows("prefix_acceptance")),
    ]


def _row(estimates: Sequence[Estimate], longest: int) -> tuple[str, ...]:
    values = [number_text(each.value) for each in estimates]
    return (*values, *[DASH] * (longest - len(values)))


def _differences(at: AtTemperature) -> list[TextTable]:
    """Every drafter against the chosen one."""
    if not at.differences:
        return []
    head = ("drafter", "scope", "accepted", "ratio", "speed ratio")
    rows = []
    for each in at.differences:
        for scope in [*at.drafters[0].domains, OVERALL] if len(at.drafters[0].domains) > 1 else [OVERALL]:
            speed = each.speed_ratio[scope] if each.speed_ratio else None
            rows.append(
                (
                    each.label,
                    scope,
                    shown(each.acceptance_length[scope], sign=True),
                    shown(each.acceptance_ratio[scope]),
                    shown(speed),
                )
            )
    title = f"{temperature_name(at.temperature)}: against {at.differences[0].against}, prompt by prompt"
    return [TextTable(title=title, head=head, rows=tuple(rows))]


def markdown(found: Sequence[TextTable], *, heading: str, facts: Sequence[str]) -> str:
    """The tables as a Markdown document."""
    lines = [f"# {heading}", "", *(f"- {fact}" for fact in facts), ""]
    for table in found:
        lines += [f"## {table.title}", "", _bar(table.head), "|---|" + "---:|" * (len(table.head) - 1)]
        lines += [*(_bar(row) for row in table.rows), ""]
        lines += [table.note, ""] if table.note else []
    return "\n".join(lines).rstrip() + "\n"


def _bar(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def print_tables(found: Sequence[TextTable], facts: Sequence[str]) -> None:
    """The tables in the terminal."""
    from rich.console import Console
    from rich.table import Table

    out = Console(highlight=False)
    for table in found:
        out.print(table.title, soft_wrap=True, style="bold")
        body = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        body.add_column(table.head[0])
        for name in table.head[1:]:
            body.add_column(name, justify="right")
        for row in table.rows:
            body.add_row(*row, style="bold" if row[0].startswith("=") or OVERALL in row[:2] else "")
        out.print(body)
        if table.note:
            out.print(table.note, soft_wrap=True, style="dim")
        out.print()
    for fact in facts:
        out.print(fact, soft_wrap=True, style="dim")


def comparison_data(comparison: Comparison) -> Mapping[str, Any]:
    """A comparison for JSON: every figure with its interval, null where there is none."""
    return dict(plain_data(comparison))
