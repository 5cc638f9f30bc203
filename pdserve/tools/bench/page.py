"""Pieces of reports, and the report as one HTML file that needs no other host and no script.

It has the style sheet of the live page, so it looks like it, in both colour schemes and on a phone.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

STYLES = (Path(__file__).parents[2] / "router/web/page/page.css", Path(__file__).parent / "report.css")
MAX_RATIO = 3.0  # of a figure to its target, that is drawn
Section = tuple[str, Sequence[str]]  # heading, and pieces of HTML; without any it is left out


def page(
    title: str,
    verdict: Sequence[str],
    sections: Sequence[Section],
    *,
    warnings: Sequence[str] = (),
    is_good: bool | None = None,
) -> str:
    """Return the report: verdict, warnings, and sections.

    Args:
        is_good: whether the verdict is; None: it is neither.
    """
    kind = {None: "", True: " good", False: " bad"}[is_good]
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{escape(title)}</title><style>{''.join(one.read_text() for one in STYLES)}</style>",
        f"<header><h1>{escape(title)}</h1><p id='about'>pdserve</p></header><main>",
        f'<section class="card verdict{kind}">{"".join(f"<p>{escape(line)}</p>" for line in verdict)}</section>',
        *(f'<p class="warning">{escape(warning)}</p>' for warning in warnings),
    ]
    for heading, pieces in sections:
        if shown := list(filter(None, pieces)):
            parts += [f"<section><h2>{escape(heading)}</h2>", *shown, "</section>"]
    return "\n".join([*parts, "</main></html>\n"])


def pair(pieces: Iterable[str]) -> str:
    """Return pieces side by side, where there is room."""
    shown = list(filter(None, pieces))
    return f'<div class="pair">{"".join(shown)}</div>' if shown else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], chosen: Iterable[int] = ()) -> str:
    """Return a table, in which `chosen` rows stand out; empty without rows."""
    if not rows:
        return ""
    marked, head = set(chosen), "".join(f"<th>{escape(one)}</th>" for one in header)
    lines = [
        f"<tr{' class=chosen' if number in marked else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for number, row in enumerate(rows)
    ]
    thead = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    return f'<div class="scroll card" tabindex="0"><table class="report">{thead}<tbody>{"".join(lines)}</tbody></table></div>'


def heat_map(corner: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | None]]) -> str:
    """Return ratios by row and column, coloured by how far below or above 1 they are; empty if there are fewer than two."""
    if sum(ratio is not None for ratios in rows.values() for ratio in ratios) < 2:
        return ""

    def cell(ratio: float | None) -> str:
        if ratio is None:
            return "<td></td>"
        share = min(1.0, abs(math.log(max(ratio, 1 / MAX_RATIO))) / math.log(MAX_RATIO))
        kind = "good" if ratio <= 1 else "bad"
        return f'<td class="c-{kind}" style="--share:{10 + 60 * share:.0f}%">{format_ratio(ratio)}</td>'

    head = "".join(f"<th>{escape(one)}</th>" for one in (corner, *columns))
    lines = [f"<tr><td>{escape(name)}</td>{''.join(map(cell, ratios))}</tr>" for name, ratios in rows.items()]
    return (
        f'<div class="scroll card" tabindex="0"><table class="report heat"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def ratios(title: str, rows: Mapping[str, tuple[float, str]]) -> str:
    """Return bars of figures divided by their targets, each with a note; empty if there are fewer than two."""
    if len(rows) < 2:
        return ""
    lines = [
        f'<li class="c-{"good" if ratio <= 1 else "bad"}"><span>{escape(name)}</span><span class="track">'
        f'<i style="width:{100 * min(ratio, MAX_RATIO) / MAX_RATIO:.1f}%"></i><b style="left:{100 / MAX_RATIO:.1f}%"></b>'
        f"</span><span>{format_ratio(ratio)}{escape(f', {note}' if note else '')}</span></li>"
        for name, (ratio, note) in rows.items()
    ]
    return f'<div class="card ratios"><h3>{escape(title)}</h3><ul>{"".join(lines)}</ul></div>'


def shares(title: str, colours: Mapping[str, str], rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Return a bar per row of its parts, which are amounts of a unit; all have one scale.

    Args:
        colours: class by name of a part.
    """
    longest = max((sum(parts.values()) for parts in rows.values()), default=0.0)
    if not longest:
        return ""

    def bar(part: str, amount: float) -> str:
        tip = f"{escape(part)} {significant(amount, 3)} {unit}"
        return f'<i class="c-{colours[part]}" style="width:{100 * amount / longest:.2f}%" title="{tip}"></i>'

    lines = [
        f'<li><span>{escape(name)}</span><span class="track parts">{"".join(map(bar, parts, parts.values()))}</span>'
        f"<span>{significant(sum(parts.values()), 3)} {unit}</span></li>"
        for name, parts in rows.items()
    ]
    legend = "".join(f'<li class="c-{colour}">{escape(part)}</li>' for part, colour in colours.items())
    return (
        f'<div class="card ratios"><h3>{escape(title)}</h3><ol class="legend">{legend}</ol>'
        f"<ul>{''.join(lines)}</ul></div>"
    )


def words(lines: Sequence[str]) -> str:
    """Return sentences, one below the other."""
    return f'<ul class="card words">{"".join(f"<li>{escape(line)}</li>" for line in lines if line)}</ul>'


def listing(lines: Sequence[str]) -> str:
    """Return lines as they are, such as commands."""
    return f'<pre class="card">{escape(chr(10).join(lines))}</pre>' if any(lines) else ""


def significant(number: float, digits: int) -> str:
    """Return a number rounded to significant digits, but never with a power of ten: 13150 where `g` has 1.315e+04."""
    rounded = float(f"{number:.{digits}g}")
    return f"{rounded:.0f}" if abs(rounded) >= 10**digits else f"{rounded:.{digits}g}"


def format_ratio(ratio: float) -> str:
    """Return a ratio as text: 1.00 only if the target is met, and `fails` from 100 on, of a fleet that loses requests."""
    ratio = 1.01 if 1 < ratio < 1.01 else ratio
    return f"{ratio:.2f}" if ratio < 10 else "fails" if ratio >= 100 else f"{ratio:.0f}"
