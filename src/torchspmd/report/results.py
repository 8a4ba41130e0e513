"""Results that commands save, told apart by their ``format``, and read from files."""

from pathlib import Path
from typing import Any

from torchspmd.comm.storage import read_json
from torchspmd.errors import UsageError

__all__ = [
    "COLUMNS",
    "COMPARISON",
    "EXPOSURE",
    "LEDGER",
    "PLAN",
    "PREDICTION",
    "SEARCH",
    "check_result",
    "compare_results",
    "read_result",
]

PREDICTION = "torchspmd/prediction"
SEARCH = "torchspmd/search"
PLAN = "torchspmd/plan"
EXPOSURE = "torchspmd/exposure"
COMPARISON = "torchspmd/comparison"
LEDGER = "torchspmd.ledger"

#: Of a timeline: one entry for each slice.
COLUMNS = (
    "lane", "start", "duration", "name", "module", "phase", "detail", "bytes", "flops",
    "waits_for", "exposed",
)  # fmt: skip

_VERSION = 1
#: What each is, and the command that writes it.
_WRITTEN_BY = {
    LEDGER: "torchspmd trace --out",
    PREDICTION: "torchspmd predict --json",
    SEARCH: "torchspmd search --json",
    PLAN: "torchspmd plan --json",
    EXPOSURE: "step.exposure(...).to_json()",
    COMPARISON: "compare_results",
}
_NEEDED = {
    LEDGER: ("totals", "groups", "events", "notes"),
    PREDICTION: ("fits", "memory", "modules"),
    SEARCH: ("candidates",),
    PLAN: ("parameters", "mesh", "axis"),
    EXPOSURE: ("collectives", "step_ms"),
    COMPARISON: ("before", "after", "names"),
}


def check_result(document: Any, where: str) -> str:
    """The format of a result.

    Raises:
        UsageError: It is not a result, is of another version, or lacks a part.
    """
    name = document.get("format") if isinstance(document, dict) else None
    if name not in _WRITTEN_BY:
        known = ", ".join(f"`{command}`" for command in _WRITTEN_BY.values())
        raise UsageError(
            f'{where} is not a result of torchspmd: its "format" is {name!r}. Give what '
            f"one of these writes: {known}."
        )
    if document.get("version") != _VERSION:
        raise UsageError(
            f"{where} is a {name} of version {document.get('version')!r}; this torchspmd "
            f"reads version {_VERSION}. Write it again with this version."
        )
    lacking = [key for key in _NEEDED[name] if key not in document]
    if lacking:
        raise UsageError(
            f"{where} is a {name} without {', '.join(lacking)}. Write it again with "
            f"`{_WRITTEN_BY[name]}`."
        )
    if name == PREDICTION and document.get("timeline"):
        _check_timeline(document["timeline"], where)
    return str(name)


def _check_timeline(timeline: Any, where: str) -> None:
    """Columns are of one length; a page that draws half of them would be wrong silently."""
    lengths = {key: len(timeline.get(key) or ()) for key in COLUMNS}
    wrong = [
        f"{key} has {length} entries, start {lengths['start']}"
        for key, length in lengths.items()
        if length != lengths["start"]
    ]
    if wrong:
        raise UsageError(
            f"{where} has a timeline whose columns do not fit together: "
            f"{'; '.join(wrong)}. Write it again with `{_WRITTEN_BY[PREDICTION]}`."
        )


def read_result(path: Path) -> dict[str, Any]:
    """A saved result as plain data.

    Raises:
        UsageError: The file cannot be read, or is not a result.

    >>> import tempfile
    >>> from torchspmd.comm import Ledger, save_ledger
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_ledger(Ledger(), Path(folder) / "ledger.json")
    ...     read_result(Path(folder) / "ledger.json")["format"]
    'torchspmd.ledger'
    """
    rule = "Give a file that a command of torchspmd wrote with --out or --json."
    document = read_json(path, UsageError, rule)
    check_result(document, str(path))
    assert isinstance(document, dict)
    return document


def compare_results(
    before: dict[str, Any], after: dict[str, Any], names: tuple[str, str]
) -> dict[str, Any]:
    """Two results of one kind, or two that both have a ledger, as one document.

    Raises:
        UsageError: They have nothing in common to compare.

    >>> from torchspmd.comm import Ledger, ledger_to_dict
    >>> ledger = ledger_to_dict(Ledger())
    >>> compare_results(ledger, ledger, ("before", "after"))["names"]
    ['before', 'after']
    """
    one, other = check_result(before, names[0]), check_result(after, names[1])
    if one != other and not (ledger_of(before) and ledger_of(after)):
        raise UsageError(
            f"{names[0]} is a {one} and {names[1]} a {other}: they have nothing to "
            "compare. Give two of one format, or a ledger and a prediction that has one."
        )
    return {
        "format": COMPARISON,
        "version": _VERSION,
        "names": list(names),
        "before": before,
        "after": after,
    }


def ledger_of(document: dict[str, Any]) -> dict[str, Any] | None:
    """The ledger that a result is or has."""
    if document.get("format") == LEDGER:
        return document
    ledger = document.get("ledger")
    return ledger if isinstance(ledger, dict) else None
