"""A lock: what a step communicates and holds in memory, as a value and as a text file."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchspmd.comm import Kind, Ledger, Phase, Total
from torchspmd.comm.folding import fold, unfold
from torchspmd.comm.storage import write_whole
from torchspmd.errors import LockError
from torchspmd.verify.contract.claim import natural


class Row(NamedTuple):
    """What makes two communications the same one, before and after a change."""

    phase: str
    module: str
    kind: str
    axis: str
    dtype: str
    implicit: bool = False
    cause: str | None = None


# Of a lock, the number of communications and their payload bytes together.
NOTHING = Total()


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank: what training holds, and the most that waits for backward."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the lock was made, and how to make it again.

    Attributes:
        script: Path of the script, relative to the lock's folder, with slashes.
        mesh: Axes and sizes, as in ``dp=2,tp=4``; their product is the world size.
        rank: The rank that was played.
        steps: How many optimizer steps were recorded; 0 for all.
        skip: How many were skipped before.
        arguments: What the script was given.
        fake: Whether its tensors held no memory.
        gpu: The GPU that it saw: a name, or a TOML file relative to the lock's folder; None
            for no particular one.
        gpus_per_node: Ranks of a node, as it saw them; None for the usual number.
    """

    script: str
    mesh: str
    rank: int = 0
    steps: int = 1
    skip: int = 0
    arguments: tuple[str, ...] = ()
    fake: bool = False
    gpu: str | None = None
    gpus_per_node: int | None = None


@dataclass(frozen=True, slots=True)
class Lock:
    """The communication of one step, by row.

    Attributes:
        made_by: The script and how it was run, or the name of a test.
        rows: Everything that was sent, by row.
        memory: What one rank holds; None where it was not watched.
        setup: What was sent before the first module was called; None: not recorded.
        notes: What a reader of the ledger must know.
        torch: The version it was made with.
        sources: Lines of the program behind the rows; not part of the file.
    """

    made_by: Recipe | str
    rows: Mapping[Row, Total]
    memory: Memory | None = None
    setup: Total | None = None
    notes: tuple[str, ...] = ()
    torch: str = str(torch.__version__).partition("+")[0]
    sources: Mapping[Row, str] = field(default_factory=dict, compare=False)

    def total(self) -> Total:
        """Everything together."""
        return sum(self.rows.values(), NOTHING)


def lock_ledger(
    ledger: Ledger,
    made_by: Recipe | str,
    *,
    memory: Memory | None = None,
    setup: Ledger | None = None,
) -> Lock:
    """Lock what was recorded; communication of run-time checks is left out.

    >>> lock_ledger(Ledger(), "a test").total()
    Total(count=0, payload_bytes=0, wire_bytes=0)

    Raises:
        LockError: Single events were dropped, and with them the reasons.
    """
    if ledger.dropped:
        raise LockError(
            f"{ledger.dropped} of {len(ledger)} communications were dropped from the "
            "ledger, and a lock needs all: record fewer steps."
        )
    rows: dict[Row, Total] = {}
    sources: dict[Row, str] = {}
    for event in ledger.events:
        if event.check:
            continue
        row = Row(
            event.phase.value,
            event.module,
            event.kind.value,
            event.axis,
            event.dtype,
            event.implicit,
            event.cause,
        )
        rows[row] = rows.get(row, NOTHING) + Total(1, event.payload_bytes)
        if event.source is not None:
            sources.setdefault(row, event.source)
    before = None if setup is None else _without_wire(setup.total(check=False))
    return Lock(
        made_by, rows, memory, before, tuple(sorted(ledger.notes)), sources=sources
    )


def _without_wire(total: Total) -> Total:
    """Wire bytes follow from the payload: a lock does not keep them."""
    return Total(total.count, total.payload_bytes)


# ----------------------------------------------------------------------------
# As text: sorted lines, one fact each, the same on every machine; and back.

VERSION = 1

_HEADER = """\
# What one step sends and holds. {writer}
# Rows: phase module kind axis dtype count bytes; [0-3] is each of these modules.
torchspmd-lock {version}
"""
_WRITERS = {
    True: "`torchspmd check` compares, `torchspmd lock` writes anew.",
    False: "pytest compares, `pytest --comm-lock-update` writes anew.",
}
_PHASES = tuple(phase.value for phase in Phase)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_MEMORY = tuple(field.name for field in fields(Memory))


def save_lock(lock: Lock, path: Path) -> None:
    """Write the file; it is replaced whole or left as it was."""
    try:
        write_whole(path, to_text(lock))
    except OSError as error:
        raise LockError(f"cannot write {path}: {error.strerror or error}.") from None


def load_lock(path: Path) -> Lock:
    """Read a file that ``save_lock`` wrote."""
    try:
        return from_text(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise LockError(f"cannot read {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise LockError(f"{path} is not a text file.") from None


def to_text(lock: Lock) -> str:
    """The lock's lines.

    >>> row = Row("forward", "GPT.layers.0.mlp", "all_reduce", "tp", "float32")
    >>> print(to_text(Lock("a test", {row: Total(1, 64)})).splitlines()[-1])
    forward GPT.layers.0.mlp all_reduce tp float32 1 64
    """
    of_script = isinstance(lock.made_by, Recipe)
    lines = [_HEADER.format(writer=_WRITERS[of_script], version=VERSION).rstrip()]
    lines += [*_recipe_lines(lock.made_by), f"torch {lock.torch}"]
    lines += [f"note {text}" for text in lock.notes]
    if lock.memory is not None:
        lines += ["", *(f"memory {n} {getattr(lock.memory, n)}" for n in _MEMORY)]
    lines.append("")
    if lock.setup is not None:
        lines.append(f"setup {lock.setup.count} {lock.setup.payload_bytes}")
    return "\n".join([*lines, *_row_lines(lock)]) + "\n"


def _recipe_lines(made_by: Recipe | str) -> Iterator[str]:
    if isinstance(made_by, str):
        yield f"test {made_by}"
        return
    yield f"script {made_by.script}"
    if made_by.arguments:
        yield f"arguments {shlex.join(made_by.arguments)}"
    yield f"mesh {made_by.mesh}"
    for name in ("rank", "steps", "skip"):
        yield f"{name} {getattr(made_by, name)}"
    if made_by.fake:
        yield "fake yes"
    if made_by.gpu is not None:
        yield f"gpu {made_by.gpu}"
    if made_by.gpus_per_node is not None:
        yield f"gpus_per_node {made_by.gpus_per_node}"


def _row_lines(lock: Lock) -> list[str]:
    rows = fold(
        (row.module, (row._replace(module=""), amount))
        for row, amount in sorted(lock.rows.items(), key=lambda item: _order(item[0]))
    )
    named = [(row._replace(module=module), amount) for module, (row, amount) in rows]
    named.sort(key=lambda item: _order(item[0]))
    return [_row_line(row, amount) for row, amount in named]


def _order(row: Row) -> tuple[Any, ...]:
    rest = (row.kind, row.axis, row.dtype, row.implicit, row.cause or "")
    return (_PHASES.index(row.phase), natural(row.module), *rest)


def _row_line(row: Row, amount: Total) -> str:
    words = [*map(_quoted, row[:5]), str(amount.count), str(amount.payload_bytes)]
    if row.implicit:
        words.append("implicit")
    if row.cause is not None:
        words += ["for", json.dumps(row.cause)]
    return " ".join(words)


def _quoted(word: str) -> str:
    return json.dumps(word) if re.search(r'[\s"]', word) or not word else word


def from_text(text: str, where: str) -> Lock:
    """A lock from its lines; ``where`` names them in an error."""
    if re.search(r"^(<<<<<<<|>>>>>>>) ", text, re.MULTILINE):
        raise LockError(
            f"{where} has conflict markers of a merge; write the lock again."
        )
    draft = _Draft()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            _read_line(draft, line)
        except (ValueError, LookupError, TypeError) as error:
            if not draft.version:
                break
            raise LockError(
                f"{where}, line {number}: cannot read {line!r} ({error}). Write the "
                "lock again."
            ) from None
    return _finish(draft, where)


@dataclass(slots=True)
class _Draft:
    """What was read so far."""

    version: int = 0
    header: dict[str, str] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    setup: Total | None = None
    notes: list[str] = field(default_factory=list)
    rows: dict[Row, Total] = field(default_factory=dict)


def _read_line(draft: _Draft, line: str) -> None:
    first, _, rest = line.partition(" ")
    if first == "torchspmd-lock":
        draft.version = int(rest)
    elif not draft.version:
        raise ValueError("the first line must say torchspmd-lock")
    elif first in _PHASES:
        _read_row(draft, line)
    elif first == "memory":
        name, size = rest.split()
        draft.memory[_MEMORY[_MEMORY.index(name)]] = int(size)
    elif first == "setup":
        count, payload_bytes = map(int, rest.split())
        draft.setup = Total(count, payload_bytes)
    elif first == "note":
        draft.notes.append(rest)
    elif first in _HEADER_WORDS and first not in draft.header:
        draft.header[first] = rest
    else:
        raise ValueError(f"{first!r} is unknown here, or there twice")


def _read_row(draft: _Draft, line: str) -> None:
    words = [json.loads(w) if w.startswith('"') else w for w in _WORD.findall(line)]
    phase, module, kind, axis, dtype, count, size, *rest = words
    implicit = rest[:1] == ["implicit"]
    reasons = rest[1:] if implicit else rest
    if reasons and (reasons[0] != "for" or len(reasons) != 2):
        raise ValueError(f"{' '.join(reasons)!r} has no meaning")
    cause = reasons[1] if reasons else None
    amount = Total(int(count), int(size))
    for name in unfold(module):
        row = Row(phase, name, Kind(kind).value, axis, dtype, implicit, cause)
        if row in draft.rows:
            raise ValueError("the same communication has a line before")
        draft.rows[row] = amount


_HEADER_WORDS: dict[str, Callable[[str], Any]] = {
    "script": str,
    "arguments": lambda text: tuple(shlex.split(text)),
    "mesh": str,
    "rank": int,
    "steps": int,
    "skip": int,
    "fake": lambda text: text == "yes",
    "gpu": str,
    "gpus_per_node": int,
    "test": str,
    "torch": str,
}


def _finish(draft: _Draft, where: str) -> Lock:
    if draft.version != VERSION:
        raise LockError(
            f"{where} is a lock of version {draft.version}; this torchspmd reads "
            f"version {VERSION}. Write the lock again."
            if draft.version
            else f"{where} is not a lock that `torchspmd lock` or pytest wrote."
        )
    try:
        header = {name: _HEADER_WORDS[name](v) for name, v in draft.header.items()}
        version, test = header.pop("torch"), header.pop("test", None)
        made_by = Recipe(**header) if test is None else test
        memory = Memory(**draft.memory) if draft.memory else None
    except (ValueError, LookupError, TypeError) as error:
        raise LockError(
            f"{where} is not complete ({error}). Write the lock again."
        ) from None
    return Lock(made_by, draft.rows, memory, draft.setup, tuple(draft.notes), version)
