"""Predicted against measured as a picture: logarithmic axes, a colour for each source."""

import math
from collections.abc import Iterator
from html import escape
from typing import Any

_SIDE, _MARGIN = 560, 60
_COLOURS = ("#0b6e99", "#d9730d", "#0f7b6c", "#ad1a72", "#6940a5", "#64473a", "#e03e3e")


def scatter(table: list[dict[str, Any]]) -> str:
    """An SVG of every row; lines are equality, and 10 % and 25 % off."""
    values = [row[key] for row in table for key in ("step", "predicted")]
    low, high = math.log10(min(values) / 1.3), math.log10(max(values) * 1.3)

    def at(milliseconds: float) -> float:
        return (math.log10(milliseconds) - low) / (high - low) * _SIDE

    sources = list(dict.fromkeys(row["source"] for row in table))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIDE + 2 * _MARGIN} '
        f'{_SIDE + 2 * _MARGIN}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<g transform="translate({_MARGIN} {_SIDE + _MARGIN}) scale(1 -1)">',
        *_guides(at, 10**low, 10**high),
    ]
    for row in table:
        colour = _COLOURS[sources.index(row["source"]) % len(_COLOURS)]
        filled = "none" if row["fitted"] else colour
        told = f"{row['row']}: {row['step']:.0f} ms, predicted {row['predicted']:.0f}"
        lines.append(
            f'<circle cx="{at(row["step"]):.1f}" cy="{at(row["predicted"]):.1f}" r="4" '
            f'stroke="{colour}" fill="{filled}" fill-opacity="0.5">'
            f"<title>{escape(told)}</title></circle>"
        )
    lines.append("</g>")
    lines += _words(at, 10**low, 10**high)
    for place, source in enumerate(sources):
        y = _MARGIN + 20 + 18 * place
        colour = _COLOURS[place % len(_COLOURS)]
        lines.append(
            f'<circle cx="{_MARGIN + 16}" cy="{y - 4}" r="5" fill="{colour}"/>'
            f'<text x="{_MARGIN + 28}" y="{y}">{escape(source)}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _guides(at: Any, low: float, high: float) -> Iterator[str]:
    yield f'<rect width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#999"/>'
    for off, dash in (
        (1.0, ""),
        (1.1, "4 3"),
        (0.9, "4 3"),
        (1.25, "1 4"),
        (0.75, "1 4"),
    ):
        start, stop = max(low, low / off), min(high, high / off)
        yield (
            f'<line x1="{at(start):.1f}" y1="{at(start * off):.1f}" x2="{at(stop):.1f}" '
            f'y2="{at(stop * off):.1f}" stroke="#888" stroke-dasharray="{dash}"/>'
        )


def _words(at: Any, low: float, high: float) -> Iterator[str]:
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        value = 10**power
        told = f"{value / 1e3:g} s" if value >= 1e3 else f"{value:g} ms"
        x, y = _MARGIN + at(value), _MARGIN + _SIDE - at(value)
        below = _SIDE + _MARGIN + 18
        yield f'<text x="{x:.0f}" y="{below}" text-anchor="middle">{told}</text>'
        yield f'<text x="{_MARGIN - 6}" y="{y + 4:.0f}" text-anchor="end">{told}</text>'
    middle = _MARGIN + _SIDE / 2
    yield (
        f'<text x="{middle}" y="{_SIDE + _MARGIN + 40}" text-anchor="middle">'
        "published step (open circles: up to 8 GPUs)</text>"
    )
    yield (
        f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">'
        "predicted step</text>"
    )
