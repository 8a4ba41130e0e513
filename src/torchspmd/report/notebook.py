"""What a notebook shows of a saved result: the verdict, small."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchspmd.comm.notebook import html_table
from torchspmd.report.figures import figure_text
from torchspmd.report.views import build_page

__all__ = ["Summary"]


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """A result's verdict; a notebook shows it as a table.

    Args:
        document: A result as plain data, as for ``write_page``.

    Raises:
        UsageError: When it is shown and is not a result.

    Example:
        >>> from torchspmd.comm import Ledger, ledger_to_dict
        >>> Summary(ledger_to_dict(Ledger()))
        Nothing is sent: 0 communications of 0 modules
    """

    document: Mapping[str, Any]

    def __repr__(self) -> str:
        answer = build_page(self.document)["views"]["verdict"]["answer"]
        return f"{answer['text']}: {answer['detail']}"

    def _repr_html_(self) -> str:
        page = build_page(self.document)
        verdict = page["views"]["verdict"]
        rows = [
            [
                each["label"],
                figure_text(each["value"], each["unit"]),
                each["note"] or "",
            ]
            for each in verdict["figures"]
        ]
        notes = [repr(self)]
        if verdict["command"]:
            notes.append(verdict["command"])
        return html_table(page["title"], ("figure", "value", ""), rows, notes)
