"""Draws a figure from its rows, for light or dark surroundings. matplotlib is loaded here and nowhere else."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dspark.errors import ConfigError
from dspark.report.material import Columns, Figure

Axes = Any  # matplotlib's; the library is optional
REMEDY = "install it with: pip install 'dspark[report]'"
MARKERS = "osD^vP*X"
LEAST_IN_BIN = 10  # predictions behind a point of a reliability diagram; fewer say nothing


@dataclass(frozen=True, kw_only=True)
class Look:
    """Colours of one kind of surroundings; lines are told apart by colour, marker and dash."""

    text: str
    grid: str
    face: str  # "none" lets the page show through
    lines: tuple[str, ...]


# Okabe and Ito's colours, told apart with any kind of sight; lightened where they stand on black
LIGHT = Look(
    text="#1c1e21",
    grid="#d5d8dc",
    face="#ffffff",
    lines=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7f6a00", "#56b4e9", "#5b5b5b", "#e69f00"),
)
DARK = Look(
    text="#e6e8eb",
    grid="#41464d",
    face="none",
    lines=("#58b2f0", "#ff8a4c", "#3fd0a4", "#eba6cb", "#e0cd5a", "#9bd8ff", "#b5b9bf", "#ffc04d"),
)


def svg(figure: Figure, look: Look) -> str:
    """The figure as SVG, letters as outlines, the same bytes for the same rows."""
    with _drawn(figure, look) as canvas:
        out = io.StringIO()
        canvas.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()


def png(figure: Figure, look: Look) -> bytes:
    """The figure as PNG, 200 dots per inch."""
    with _drawn(figure, look) as canvas:
        out = io.BytesIO()
        canvas.savefig(out, format="png", dpi=200)
        return out.getvalue()


@contextmanager
def _drawn(figure: Figure, look: Look) -> Iterator[Any]:
    """A matplotlib figure with everything on it, under settings that end with the block."""
    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ConfigError(f"figures are drawn with matplotlib, which is not installed; {REMEDY}") from None
    settings = {
        "font.family": "DejaVu Sans",  # comes with matplotlib, so that a figure is the same everywhere
        "font.size": 9,
        "svg.hashsalt": "dspark",
        "text.color": look.text,
        "axes.labelcolor": look.text,
        "axes.edgecolor": look.grid,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "xtick.color": look.text,
        "ytick.color": look.text,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": look.grid,
        "grid.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "figure.facecolor": look.face,
        "savefig.facecolor": look.face,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(settings):
        canvas = Canvas(layout="constrained")
        DRAWERS[figure.key](canvas, figure, look)
        yield canvas


def _panels(canvas: Any, count: int, *, columns: int = 3, width: float = 3.1, height: float = 2.7) -> list[Axes]:
    """``count`` panels of equal size in rows of ``columns``."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    canvas.set_size_inches(max(5.0, width * columns), height * rows + 0.4)
    grid = canvas.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    return list(grid.flat[:count])


def _style(i: int, look: Look) -> dict[str, Any]:
    return {
        "color": look.lines[i % len(look.lines)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 4,
        "linewidth": 1.6,
        "linestyle": ("-", "--", "-.", ":")[(i // len(look.lines)) % 4],
    }


def _numbers(values: Sequence[Any]) -> list[float]:
    """Missing values as gaps."""
    return [math.nan if value is None else float(value) for value in values]


def _legend(canvas: Any, axes: Axes, count: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        canvas.legend(handles, labels, loc="outside lower center", ncols=min(4, count))


def _position(canvas: Any, figure: Figure, look: Look) -> None:
    data = figure.data
    domains = data.distinct("domain")
    methods = data.distinct("method")
    panels = _panels(canvas, len(domains), columns=2 if len(domains) == 4 else 3)
    for axes, domain in zip(panels, domains, strict=True):
        for i, name in enumerate(methods):
            rows = data.where(domain=domain, method=name, kind="conditional")
            x, y = data.values(rows, "position"), _numbers(data.values(rows, "value"))
            axes.plot(x, y, label=name, **_style(i, look))
            low, high = (_numbers(data.values(rows, end)) for end in ("low", "high"))
            axes.fill_between(x, low, high, color=look.lines[i % len(look.lines)], alpha=0.15, linewidth=0)
        axes.set(title=domain, xlabel="position in the block", ylabel="accepted, given its prefix", ylim=(0, 1.02))
        axes.set_xticks(sorted({row[data.names.index("position")] for row in data.rows}))
    _legend(canvas, panels[0], len(methods))


def _shape(canvas: Any, data: Columns, look: Look, *, label: str, overhead: bool) -> None:
    """Acceptance length against a number of the drafter's shape; a last panel for the sequential share."""
    domains, methods = data.distinct("domain"), data.distinct("method")
    count = len(domains) + overhead
    panels = _panels(canvas, count, columns=3 if count != 4 else 2)
    ticks = sorted(set(data.values(data.rows, "x")))
    apart = 0.012 * (ticks[-1] - ticks[0])  # between methods at one place, so that their bars do not lie on each other
    for axes, domain in zip(panels, domains, strict=False):
        for i, name in enumerate(methods):
            rows = sorted(data.where(domain=domain, method=name), key=lambda row: row[3])
            y = _numbers(data.values(rows, "value"))
            bars = [
                [max(0.0, v - b) for v, b in zip(y, _numbers(data.values(rows, "low")), strict=True)],
                [max(0.0, t - v) for v, t in zip(y, _numbers(data.values(rows, "high")), strict=True)],
            ]
            x = [at + apart * (i - (len(methods) - 1) / 2) for at in data.values(rows, "x")]
            axes.errorbar(x, y, yerr=bars, label=name, capsize=2, elinewidth=1, **_style(i, look))
        axes.set(title=domain, xlabel=label, ylabel="tokens per round")
        axes.set_xticks(ticks)
    if overhead:
        scope = domains[-1]  # the mean, where there are several
        for i, name in enumerate(methods):
            rows = sorted(data.where(domain=scope, method=name), key=lambda row: row[3])
            share = [100 * value for value in _numbers(data.values(rows, "sequential_share"))]
            panels[-1].plot(data.values(rows, "x"), share, label=name, **_style(i, look))
        panels[-1].set(title="drawing left to right", xlabel=label, ylabel="% of a round's time")
        panels[-1].set_xticks(ticks)
        panels[-1].set_ylim(bottom=0)
    _legend(canvas, panels[0], len(methods))


def _depth(canvas: Any, figure: Figure, look: Look) -> None:
    _shape(canvas, figure.data, look, label="layers of the drafter", overhead=False)


def _block(canvas: Any, figure: Figure, look: Look) -> None:
    _shape(canvas, figure.data, look, label="block length", overhead=True)


def _threshold(canvas: Any, figure: Figure, look: Look) -> None:
    data = figure.data
    domains = data.distinct("domain")
    panels = _panels(canvas, 2, columns=2, width=4.2)
    for i, domain in enumerate(domains):
        rows = data.where(domain=domain)
        x = data.values(rows, "threshold")
        for axes, name in zip(panels, ("acceptance_rate", "acceptance_length"), strict=True):
            axes.plot(x, _numbers(data.values(rows, name)), label=domain, **_style(i, look))
        low, high = (_numbers(data.values(rows, end)) for end in ("low", "high"))
        panels[0].fill_between(x, low, high, color=look.lines[i % len(look.lines)], alpha=0.15, linewidth=0)
    panels[0].set(
        title="what is checked", xlabel="threshold", ylabel="share of checked drafts accepted", ylim=(0, 1.02)
    )
    panels[1].set(title="what is left", xlabel="threshold", ylabel="tokens per round")
    _legend(canvas, panels[0], len(domains))


def _reliability(canvas: Any, figure: Figure, look: Look) -> None:
    data, (quality,) = figure.data, figure.more.values()
    positions = data.distinct("position")
    panels = _panels(canvas, len(positions), columns=min(4, len(positions)), width=2.4, height=2.4)
    for axes, position in zip(panels, positions, strict=True):
        counts = axes.twinx()
        counts.set_axis_off()
        axes.plot([0, 1], [0, 1], color=look.grid, linewidth=1.2)
        for i, when in enumerate(data.distinct("when")):
            rows = data.where(position=position, when=when)
            enough = [row for row in rows if row[data.names.index("count")] >= LEAST_IN_BIN]
            x, y = data.values(enough, "prediction"), data.values(enough, "label")
            axes.plot(x, y, label=when, **_style((1, 2, 0)[i % 3], look))
            if when == "Platt":
                all_x = data.values(rows, "prediction")
                counts.bar(all_x, data.values(rows, "count"), width=0.04, color=look.lines[0], alpha=0.2)
        low, high = counts.get_ylim()
        counts.set_ylim(low, 2.5 * high)
        (row,) = quality.where(position=position)
        names = ("ece", "ece STS", "ece Platt", "floor")
        ece = [100 * value for value in _numbers([row[quality.names.index(name)] for name in names])]
        drafts = f"drafts 1 to {position}" if position > 1 else "draft 1"
        axes.set_title(f"{drafts}\nECE {ece[0]:.1f}, {ece[1]:.1f}, {ece[2]:.1f} ({ece[3]:.1f}) %", fontsize=9)
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        axes.set_zorder(counts.get_zorder() + 1)
    for axes in panels[:: min(4, len(positions))]:
        axes.set_ylabel("measured")
    for axes in panels[-min(4, len(positions)) :]:
        axes.set_xlabel("predicted")
    _legend(canvas, panels[0], 3)


def _throughput(canvas: Any, figure: Figure, look: Look) -> None:
    data = figure.data
    (axes,) = _panels(canvas, 1, width=6.4, height=4.2)
    names = data.distinct("scheduler")
    for i, name in enumerate(names):
        rows = data.where(scheduler=name)
        x, y = (_numbers(data.values(rows, column)) for column in ("user_speed", "throughput"))
        axes.plot(x, y, label=name, **_style(i, look))
    axes.set(xlabel="tokens per second of one user (median)", ylabel="tokens per second of all users")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _legend(canvas, axes, len(names))


def _budget(canvas: Any, figure: Figure, look: Look) -> None:
    data = figure.data
    (axes,) = _panels(canvas, 1, width=6.4, height=3.6)
    names = data.distinct("scheduler")
    for i, name in enumerate(names):
        rows = data.where(scheduler=name)
        axes.plot(
            data.values(rows, "users"), _numbers(data.values(rows, "verify_tokens")), label=name, **_style(i, look)
        )
    axes.set(xlabel="users", ylabel="tokens checked per request and step", xscale="log")
    ticks = sorted(set(data.values(data.rows, "users")))
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    _legend(canvas, axes, len(names))


DRAWERS: dict[str, Callable[[Any, Figure, Look], None]] = {
    "position": _position,
    "depth": _depth,
    "block": _block,
    "threshold": _threshold,
    "reliability": _reliability,
    "throughput": _throughput,
    "budget": _budget,
}
