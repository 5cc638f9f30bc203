"""Charts of reports: points and lines by two numbers, as SVG without a script. Plain text from plain data.

The drawing is stretched to its place, and all text is HTML above it, so that letters and dots keep their size on a phone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

COLOURS = ("prefill", "connector", "decode", "router")  # classes of the live page's style sheet
TICKS = 5  # about as many on an axis
LETTER, LINE = 2.2, 8.0  # width of a letter and height of a line, in percent of a chart on a phone
ROOM_X, ROOM_Y = 0.02, 0.06  # of the span, beyond the highest value


@dataclass(frozen=True)
class Curve:
    """Points of one kind in a chart.

    Attributes:
        colour: one of `COLOURS`, or `bad`.
        is_line: they are joined, otherwise they are dots.
        is_stepped: joined by steps, of a number that holds until the next point.
        labels: of the points, for the tip under a pointer; written beside them if `is_named`.
    """

    x: Sequence[float]
    y: Sequence[float]
    name: str = ""
    colour: str = COLOURS[0]
    is_line: bool = False
    is_stepped: bool = False
    labels: Sequence[str] = ()
    is_named: bool = False


@dataclass(frozen=True)
class Axis:
    """Range of an axis, with the tick values that are written on it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Return the place of a value in percent of the axis."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)


def axis(values: Sequence[float], most: float | None = None, room: float = ROOM_Y) -> Axis:
    """Return an axis from 0, or from the lowest value if the span is small beside it, to `most` or beyond the highest.

    Whole numbers have whole ticks.
    """
    low, high = min(values), max(values)
    low = 0.0 if low >= 0 and high > 0 and high - low > 0.1 * high else low
    high = most if most is not None else high + room * (high - low or abs(high) or 1.0)
    step = 10 ** math.floor(math.log10((high - low) / TICKS))
    step *= min((factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= TICKS + 2), default=10)
    step = max(step, 1.0) if all(float(one).is_integer() for one in values) else step
    first = math.ceil(low / step)
    return Axis(low, high, tuple(number * step for number in range(first, math.floor(high / step + 1e-9) + 1)))


def num_places(curves: Iterable[Curve]) -> int:
    """Return how many places of a chart have something in them: one alone is not worth drawing."""
    return len({(x, y) for curve in curves for x, y in zip(curve.x, curve.y, strict=True)})


def plot(
    title: str,
    curves: Sequence[Curve],
    x_label: str,
    *,
    at_x: Sequence[float] = (),
    at_y: Sequence[float] = (),
    most_y: float | None = None,
) -> str:
    """Return a chart as HTML; empty if it has fewer than two places with something in them.

    Args:
        at_x, at_y: values with a dashed line across the chart, such as a target.
        most_y: upper end of the vertical axis, by default above the highest point.
    """
    curves = [curve for curve in curves if curve.x]
    if num_places(curves) < 2:
        return ""
    across = axis([x for curve in curves for x in curve.x] + list(at_x), room=ROOM_X)
    up = axis([y for curve in curves for y in curve.y] + list(at_y), most_y)
    grid = "".join(f"M0,{100 - up.place(tick)}h100" for tick in up.ticks)
    marks = "".join(f"M{across.place(x)},0v100" for x in at_x) + "".join(f"M0,{100 - up.place(y)}h100" for y in at_y)
    drawn = [f'<path class="grid" d="{grid}"/>', f'<path class="mark" d="{marks}"/>' if marks else ""]
    drawn += [_draw(curve, across, up) for curve in curves]
    texts = [f'<span class="y" style="bottom:{up.place(tick)}%">{tick:g}</span>' for tick in _rounded(up.ticks)]
    texts += [f'<span class="x" style="left:{across.place(tick)}%">{tick:g}</span>' for tick in _rounded(across.ticks)]
    texts += _names(curves, across, up)
    target = '<li class="dashed">target</li>' if at_y else ""
    known = {curve.name: curve.colour for curve in curves if curve.name}
    legend = "".join(f'<li class="c-{colour}">{escape(name)}</li>' for name, colour in known.items())
    return (
        f'<figure class="plot card"><h3>{escape(title)}</h3><ul class="legend">{legend}{target}</ul><div class="area">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"{''.join(drawn)}</svg>{''.join(texts)}</div><p class='note'>{escape(x_label)}</p></figure>"
    )


def _rounded(ticks: Sequence[float]) -> list[float]:
    return [float(f"{tick:.6g}") for tick in ticks]


def _draw(curve: Curve, across: Axis, up: Axis) -> str:
    points = [(across.place(x), round(100 - up.place(y), 2)) for x, y in zip(curve.x, curve.y, strict=True)]
    if curve.is_stepped:
        points = [points[0], *(one for (_, y), (x, after) in pairwise(points) for one in ((x, y), (x, after)))]
    parts = []
    if curve.is_line or curve.is_stepped:
        parts.append(f'<path class="line" d="M{" ".join(f"{x},{y}" for x, y in points)}"/>')
    if curve.labels:
        dots = zip(points, curve.labels, strict=True)
        parts += [f'<path class="dot" d="M{x},{y}h0"><title>{escape(label)}</title></path>' for (x, y), label in dots]
    elif not parts:
        parts.append(f'<path class="dot small" d="{"".join(f"M{x},{y}h0" for x, y in points)}"/>')
    return f'<g class="c-{curve.colour}">{"".join(parts)}</g>'


def _names(curves: Sequence[Curve], across: Axis, up: Axis) -> list[str]:
    """Return the names of points beside them, without those that would cover another name or a dot, or be cut off."""
    placed, texts = list[tuple[float, float, float]](), []
    dots = [(across.place(x), up.place(y)) for curve in curves for x, y in zip(curve.x, curve.y, strict=True)]
    for curve in curves:
        for x, y, label in zip(curve.x, curve.y, curve.labels if curve.is_named else [], strict=False):
            place, bottom, width = across.place(x), up.place(y), LETTER * len(label)
            is_right = place + width <= 100
            left = place if is_right else place - width
            is_taken = any(abs(bottom - y0) < LINE and left < x1 and x0 < left + width for x0, x1, y0 in placed)
            if left < 0 or is_taken or any(left < x0 < left + width and bottom < y0 < bottom + LINE for x0, y0 in dots):
                continue
            placed.append((left, left + width, bottom))
            side = f"left:{place}%" if is_right else f"right:{100 - place:.2f}%"
            texts.append(f'<span class="name" style="{side};bottom:{bottom}%">{escape(label)}</span>')
    return texts
