"""A ledger as a versioned JSON file, and back.

Format version 1: groups and rows of totals are tables; single events refer to groups by
their place in the table. Files are written whole or not at all.
"""

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from torchspmd.comm.event import CommEvent, Group, Phase
from torchspmd.comm.kinds import Kind
from torchspmd.comm.ledger import Key, Ledger, Total
from torchspmd.errors import LedgerError, SpmdError

FORMAT = "torchspmd.ledger"
VERSION = 1


def save_ledger(
    ledger: Ledger,
    path: str | os.PathLike[str],
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a ledger to a JSON file; the file is replaced whole or left as it was.

    Args:
        ledger: What was recorded.
        path: Of the file.
        about: How it was recorded: ``command``, ``script``, ``world_size``, ``rank``,
            ``num_ranks`` that it is the sum of, ``steps``. The page shows it.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "ledger.json"
    >>> save_ledger(Ledger(), path)
    >>> load_ledger(path) == Ledger()
    True

    Raises:
        LedgerError: The file cannot be written.
    """
    text = json.dumps(ledger_to_dict(ledger, about=about), indent=1) + "\n"
    try:
        write_whole(Path(path), text)
    except OSError as error:
        raise LedgerError(f"cannot write {path}: {error.strerror or error}.") from None


def load_ledger(path: str | os.PathLike[str]) -> Ledger:
    """Read a ledger that ``save_ledger`` or ``torchspmd trace --out`` wrote.

    >>> load_ledger("missing.json")
    Traceback (most recent call last):
        ...
    torchspmd.errors.LedgerError: cannot read missing.json: No such file or directory.

    Raises:
        LedgerError: The file cannot be read, is not a ledger, or has another version.
    """
    rule = "Give a file written by `torchspmd trace --out` or `save_ledger`."
    return ledger_from_dict(read_json(path, LedgerError, rule), str(path))


def read_json(path: str | os.PathLike[str], error: type[SpmdError], rule: str) -> Any:
    """What a JSON file holds.

    Args:
        path: The file.
        error: What is raised where it cannot be read, or is not JSON.
        rule: Which file to give instead of one that is not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as failure:
        why = failure.strerror or failure
        raise error(f"cannot read {path}: {why}.") from None
    except (ValueError, RecursionError):
        raise error(f"{path} is not JSON. {rule}") from None


def ledger_to_dict(
    ledger: Ledger, *, about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A ledger as plain JSON values; ``about`` as in ``save_ledger``."""
    groups = list({event.group: None for event in ledger.events})
    places = {group: place for place, group in enumerate(groups)}
    return {
        "format": FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        **({} if about is None else {"about": dict(about)}),
        "max_events": ledger.max_events,
        "dropped_events": ledger.dropped,
        "notes": ledger.notes,
        "groups": [
            {"name": group.name, "ranks": group.ranks, "axis": group.axis}
            for group in groups
        ],
        "totals": [
            {**key._asdict(), **asdict(total)} for key, total in ledger.rows.items()
        ],
        "events": [
            {**event._asdict(), "group": places[event.group]} for event in ledger.events
        ],
    }


def ledger_from_dict(data: Any, where: str) -> Ledger:
    """A ledger from plain JSON values; ``where`` names them in an error."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise LedgerError(
            f"{where} is JSON, but not a torchspmd ledger: it has no "
            f'"format": "{FORMAT}". Give a file written by `torchspmd trace --out` or '
            "`save_ledger`."
        )
    if data.get("version") != VERSION:
        raise LedgerError(
            f"{where} has ledger format version {data.get('version')!r}; this torchspmd "
            f"reads version {VERSION}. Write the file again with this version."
        )
    try:
        return _build_ledger(data)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise LedgerError(
            f"{where} is a torchspmd ledger with a broken entry "
            f"({type(error).__name__}: {error}). Write the file again."
        ) from None


def _build_ledger(data: dict[str, Any]) -> Ledger:
    ledger = Ledger(max_events=data["max_events"])
    for row in data["totals"]:
        rest = dict(row)
        total = {field.name: int(rest.pop(field.name)) for field in fields(Total)}
        key = Key(**{**rest, "kind": Kind(rest["kind"]), "phase": Phase(rest["phase"])})
        ledger.add_total(key, Total(**total))
    groups = [
        Group(group["name"], tuple(group["ranks"]), group["axis"])
        for group in data["groups"]
    ]
    events = [_event_from_dict(event, groups) for event in data["events"]]
    ledger.restore_events(events, int(data["dropped_events"]))
    for text, times in data["notes"].items():
        ledger.note(text, int(times))
    return ledger


def _event_from_dict(data: dict[str, Any], groups: list[Group]) -> CommEvent:
    return CommEvent(
        **{
            **data,
            "kind": Kind(data["kind"]),
            "phase": Phase(data["phase"]),
            "shape": tuple(data["shape"]),
            "group": groups[_place(data["group"])],
        }
    )


def _place(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a place in the table of groups")
    return value


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never a part.

    A link stays a link: the file that it points to is replaced. Pipes and devices, such as
    ``/dev/stdout``, are written to.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(_mode_of(path))
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _mode_of(path: Path) -> int:
    """The permissions of the file that is replaced, or those of any new file."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
