"""The report as one HTML file: no script, nothing loaded from elsewhere, readable in light and dark and on a phone."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dspark.evaluate.tables import TextTable
from dspark.report.material import Columns, Figure

STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --soft: #5a6068; --face: #ffffff; --edge: #d5d8dc; --band: #f4f5f6;
  --link: #0059a8; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --soft: #a4abb3; --face: #16181b; --edge: #3a3f45; --band: #1f2226; --link: #7cc4ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 64rem; font: 16px/1.5 system-ui, sans-serif;
  color: var(--text); background: var(--face); }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .3rem; }
a { color: var(--link); } nav a { display: inline-block; margin-right: 1rem; }
p, figcaption { max-width: 46rem; } figure { margin: 0; } img { max-width: 100%; height: auto; }
figcaption, .note { color: var(--soft); font-size: .93rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .7rem .22rem 0; text-align: right; border-bottom: 1px solid var(--edge); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
tr.sum td { font-weight: 600; background: var(--band); }
pre { overflow-x: auto; padding: .6rem .8rem; background: var(--band); border: 1px solid var(--edge);
  border-radius: 6px; font-size: .82rem; }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--link); }
details .wide { max-height: 24rem; overflow: auto; margin-top: .4rem; }
.missing { padding: .8rem 1rem; border: 1px dashed var(--edge); border-radius: 6px; color: var(--soft); }
ul { padding-left: 1.2rem; } li { overflow-wrap: anywhere; }
"""


def page(
    figures: Sequence[Figure],
    images: Mapping[str, tuple[str, str]],
    tables: Sequence[TextTable],
    *,
    facts: Sequence[str],
    title: str = "Speculative decoding, measured",
) -> str:
    """The whole page. ``images`` holds the SVGs of every drawn figure by key: for light and for dark surroundings."""
    links = [f'<a href="#{f.key}">{f.number}. {escape(f.title)}</a>' for f in figures]
    links = ['<a href="#tables">Tables</a>', *links] if tables else links
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        _facts(facts),
        f"<nav>{' '.join(links)}</nav>",
        *([_tables(tables)] if tables else []),
        *(_figure(figure, images.get(figure.key)) for figure in figures),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _facts(facts: Sequence[str]) -> str:
    """Where everything comes from; folded, for it is long."""
    items = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    return f"<details><summary>Made from {len(facts) - 1} sources</summary><ul>{items}</ul></details>" if facts else ""


def _tables(tables: Sequence[TextTable]) -> str:
    """Overviews stand open, the others are folded."""
    parts = ['<h2 id="tables">Tables</h2>']
    for table in tables:
        note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
        body = f"{_grid(table.head, table.rows)}{note}"
        title = escape(table.title)
        folded = f"<details><summary>{title}</summary>{body}</details>"
        parts.append(f"<h3>{title}</h3>{body}" if table.overview else folded)
    return "\n".join(parts)


def _figure(figure: Figure, images: tuple[str, str] | None) -> str:
    """A section: picture, caption, the data and the commands behind it; or what is missing."""
    heading = f'<h2 id="{figure.key}">{figure.number}. {escape(figure.title)}</h2>'
    if figure.missing or images is None:
        why, _, command = figure.missing.partition(" Make it: ")
        return f'{heading}<div class="missing"><p>{escape(why)} This makes it:</p><pre>{escape(command)}</pre></div>'
    light, dark = (_data_uri(image) for image in images)
    alt = escape(f"{figure.title}. {figure.caption}", quote=True)
    parts = [
        heading,
        "<figure><picture>",
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">',
        f'<img src="{light}" alt="{alt}"></picture>',
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>",
        *(_titled(name, columns) for name, columns in figure.more.items()),
        f"<details><summary>Data ({len(figure.data.rows)} rows; also in {escape(figure.name)}.json)</summary>",
        f"{_columns(figure.data)}</details>",
        "<details open><summary>Commands behind it</summary>",
        f"<pre>{escape(chr(10).join(figure.commands))}</pre></details>",
    ]
    return "\n".join(parts)


def _titled(name: str, columns: Columns) -> str:
    return f"<h3>{escape(name)}</h3>{_columns(columns)}"


def _columns(columns: Columns) -> str:
    return _grid(columns.names, [tuple(_text(value) for value in row) for row in columns.rows])


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join(
        f"<tr{' class=sum' if row and row[0].startswith('=') else ''}>"
        f"{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>"
        for row in rows
    )
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(value: Any) -> str:  # Any: what a cell of a table may hold
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode("utf-8")).decode("ascii")
