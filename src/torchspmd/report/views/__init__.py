"""Results as the views of the page: plain data in, plain data out, no HTML.

Each view is a dict that a script of the page draws, or ``{"missing": why, "command": how}``
where the result has no data for it. Values are numbers with a unit (``B``, ``s``, ``n``,
``%``, ``flop``); the page formats them.
"""

from collections.abc import Callable
from typing import Any

from torchspmd.errors import SpmdError, UsageError
from torchspmd.report.results import (
    COMPARISON,
    EXPOSURE,
    LEDGER,
    PLAN,
    PREDICTION,
    SEARCH,
    check_result,
)
from torchspmd.report.views.compare import comparison_page
from torchspmd.report.views.exposure import exposure_page
from torchspmd.report.views.ledger import ledger_page
from torchspmd.report.views.parts import Document, Page
from torchspmd.report.views.plan import plan_page
from torchspmd.report.views.prediction import prediction_page
from torchspmd.report.views.search import search_page

__all__ = ["build_page"]

_BUILDERS: dict[str, Callable[[Document], Page]] = {
    PREDICTION: prediction_page,
    LEDGER: ledger_page,
    PLAN: plan_page,
    EXPOSURE: exposure_page,
    SEARCH: search_page,
}


def build_page(document: Any, where: str = "the document") -> Page:
    """What the page shows of a result.

    Args:
        document: A saved result, as plain data.
        where: What to call it in an error: its file.

    Raises:
        UsageError: It is not a result, or one of another version.
    """
    name = check_result(document, where)
    try:
        return _build(name, document, where)
    except SpmdError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{where} is a {name} with a broken entry ({type(error).__name__}: {error}). "
            "docs/prediction_format.md says what it must have; write it again."
        ) from error


def _build(name: str, document: Document, where: str) -> Page:
    if name == COMPARISON:
        before, after = document["before"], document["after"]
        names = [str(each) for each in document["names"]]
        pages = [
            build_page(before, f"{where}, before"),
            build_page(after, f"{where}, after"),
        ]
        return comparison_page(document, pages, names)
    return _BUILDERS[name](document)
