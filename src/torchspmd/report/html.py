"""A result as one self-contained HTML file.

The file has the data as JSON, a style sheet and a script, and nothing else: it opens from a
disk, without a network. What the data says is written into the page as text, never as HTML.
"""

import base64
import gzip
import hashlib
import html
import json
import math
import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from torchspmd.comm.storage import write_whole
from torchspmd.errors import UsageError
from torchspmd.report.views import build_page

__all__ = ["page_html", "write_page"]

# In this order: later ones use what earlier ones define.
_SCRIPTS = (
    "dom.js", "format.js", "range.js", "table.js", "verdict.js", "timeline.js",
    "memory.js", "modules.js", "mesh.js", "compare.js", "app.js",
)  # fmt: skip
_PLAIN = 100_000  # characters of data that are readable in the file; above, packed


def write_page(document: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a result as a page; the file is replaced whole or left as it was.

    Args:
        document: A result as plain data: a prediction, a search, a ledger, a plan, a
            measured exposure, or two of them by ``compare_results``.
        path: Of the HTML file.

    Raises:
        UsageError: The document is not a result, or the file cannot be written.

    >>> import tempfile
    >>> from torchspmd.comm import Ledger, ledger_to_dict
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_page(ledger_to_dict(Ledger()), Path(folder) / "page.html")
    ...     print(*os.listdir(folder))
    page.html
    """
    text = page_html(document)
    try:
        write_whole(Path(path), text)
    except OSError as error:
        raise UsageError(
            f"cannot write the page {path}: {error.strerror or error}. Name a file in a "
            "folder that you may write to."
        ) from None


def page_html(document: Mapping[str, Any]) -> str:
    """The page of a result, as text.

    >>> from torchspmd.comm import Ledger, ledger_to_dict
    >>> page_html(ledger_to_dict(Ledger())).startswith("<!doctype html>")
    True
    """
    page = build_page(document)
    encoding, data = _encode(page)
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "@hash@": digest,
        "@title@": html.escape(f"{page['title']} · torchspmd"),
        "@style@": _file("page.css"),
        "@encoding@": encoding,
        "@data@": data,
        "@script@": script,
    }
    text = _file("template.html")
    pieces = []
    for mark, part in parts.items():
        before, found, text = text.partition(mark)
        assert found, f"the template has no {mark} at its place"
        pieces += [before, part]
    return "".join([*pieces, text])


def _encode(page: dict[str, Any]) -> tuple[str, str]:
    """The data as an element of the page can hold it, and how it is written."""
    try:
        text = json.dumps(page, separators=(",", ":"), allow_nan=False)
    except ValueError:
        places = ", ".join(_not_finite(page, "")) or "an unknown place"
        raise UsageError(
            f"the result has numbers that are not finite, which JSON cannot hold: "
            f"{places}. Write null where a figure is not known."
        ) from None
    if len(text) > _PLAIN:
        packed = gzip.compress(text.encode(), mtime=0)
        return "gzip+base64", base64.b64encode(packed).decode()
    # `</script>` would end the element; JSON may write the same letter like this.
    return "json", text.replace("<", "\\u003c")


def _not_finite(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield where or "the document"
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _not_finite(each, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from _not_finite(each, f"{where}[{place}]")


@cache
def _script() -> str:
    return '"use strict";(() => {\n' + "\n".join(map(_file, _SCRIPTS)) + "})();\n"


@cache
def _file(name: str) -> str:
    folder = resources.files("torchspmd.report") / "page"
    return (folder / name).read_text(encoding="utf-8")
