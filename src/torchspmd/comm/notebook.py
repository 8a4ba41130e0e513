"""Small tables for notebooks: texts in, escaped HTML out."""

import html
from collections.abc import Iterable, Sequence

_MOST = 40  # rows; a notebook is no place for thousands


def html_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Iterable[str] = (),
) -> str:
    """A table with its title above and notes below, every text escaped.

    >>> html_table("<b>", ["count"], [["1"]])[:32]
    '<div><p><b>&lt;b&gt;</b></p><tab'
    """
    heads = "".join(f"<th>{html.escape(text)}</th>" for text in header)
    lines = (
        "".join(f"<td>{html.escape(text)}</td>" for text in row) for row in rows[:_MOST]
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    left = len(rows) - _MOST
    more = [f"and {left} more rows; print it to see them"] if left > 0 else []
    below = "".join(f"<p>{html.escape(text)}</p>" for text in [*more, *notes])
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    return (
        f"<div><p><b>{html.escape(title)}</b></p>{table if rows else ''}{below}</div>"
    )
