"""Reports as text: tables on a rich console, plain when it is not a terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from torchspmd.comm import Change, Ledger, Phase, format_bytes
from torchspmd.comm.folding import fold, unfold
from torchspmd.comm.tree import build_tree, fold_alike

# ----------------------------------------------------------------------------
# The path of a module in a narrow column: it breaks after dots, not inside of names.


@dataclass(frozen=True, slots=True)
class ModulePath:
    """A path as rich prints it."""

    path: str

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Text]:
        for line in break_path(self.path, options.max_width):
            yield Text(line, overflow="fold")

    def __rich_measure__(
        self, console: Console, options: ConsoleOptions
    ) -> Measurement:
        lines = break_path(self.path, options.max_width)
        widest = min(max(map(len, lines)), options.max_width)
        return Measurement(min(1, widest), widest)


def break_path(path: str, width: int) -> list[str]:
    """Lines of at most this width; a part that is wider by itself has its own.

    >>> break_path("GPT.layers.[0-3].norm1 x4", 16)
    ['GPT.layers.', '[0-3].norm1 x4']
    """
    lines = [""]
    *parts, last = path.split(".")
    for part in [*(f"{part}." for part in parts), last]:
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def print_ledger(ledger: Ledger, console: Console, *, num_ranks: int = 1) -> None:
    """The module tree, the sums by kind, and what a reader must know.

    Args:
        ledger: What one rank communicated, or the sum of several.
        console: Where to print.
        num_ranks: How many ranks the ledger is the sum of.

    Example:
        >>> from torchspmd.comm import CommEvent, Group, Kind
        >>> event = CommEvent(Kind.ALL_REDUCE, "c10d.allreduce_", "float32", (8,), 32, 48,
        ...                   Group("0", (0, 1, 2, 3), axis="tp"))
        >>> ledger = Ledger()
        >>> ledger.append(event)
        >>> print_ledger(ledger, Console(width=70))  # doctest: +NORMALIZE_WHITESPACE
        Communication by module
        module  fwd  own  total  payload  wire/rank
        Global    1    1      1     32 B       48 B
        <BLANKLINE>
        Communication by kind
        kind        axis  dtype    phase    count  payload  wire/rank
        all_reduce  tp    float32  forward      1     32 B       48 B
        <BLANKLINE>
    """
    _print(console, module_table(ledger, console.is_terminal, num_ranks))
    _print(console, kind_table(ledger, console.is_terminal, num_ranks))
    for line in note_lines(ledger):
        console.print(Text(line))


def print_changes(changes: Sequence[Change], console: Console) -> None:
    """What differs between two ledgers, or that nothing does.

    >>> from torchspmd.comm import diff_ledgers
    >>> print_changes(diff_ledgers(Ledger(), Ledger()), Console())
    The two ledgers are equal.
    """
    if not changes:
        console.print("The two ledgers are equal.")
        return
    _print(console, change_table(changes, console.is_terminal))
    count = sum(change.added_count for change in changes)
    size = sum(change.added_bytes for change in changes)
    console.print(
        f"{len(changes)} differences: {count:+d} communications, "
        f"{'+' if size >= 0 else ''}{format_bytes(size)} payload."
    )


def module_table(
    ledger: Ledger, is_terminal: bool = False, num_ranks: int = 1
) -> Table:
    """Modules with their counts by phase, own and total, and their bytes."""
    root = fold_alike(build_tree(ledger))
    phases = [phase for phase in Phase if ledger.total(phase=phase).count]
    names = {Phase.FORWARD: "fwd", Phase.BACKWARD: "bwd", Phase.RECOMPUTE: "recomp"}
    table = plain_table("Communication by module", is_terminal)
    table.add_column("module", overflow="fold", ratio=1)
    for phase in phases:
        table.add_column(names.get(phase, "optim"), justify="right", no_wrap=True)
    for name in ("own", "total", "payload", "wire/rank"):
        table.add_column(name, justify="right", no_wrap=True)
    for depth, node in root.walk():
        total = node.total.total()
        counts = (node.total.total(phase=phase).count for phase in phases)
        times = len(unfold(node.label))
        table.add_row(
            Text("  " * depth + node.label + (f" x{times}" if times > 1 else "")),
            *(str(count) if count else "." for count in counts),
            str(len(node.own)),
            str(total.count),
            format_bytes(total.payload_bytes),
            format_bytes(round(total.wire_bytes / num_ranks)),
        )
    return table


def kind_table(ledger: Ledger, is_terminal: bool = False, num_ranks: int = 1) -> Table:
    """Sums by kind, axis, dtype and phase."""
    table = plain_table("Communication by kind", is_terminal)
    for name in ("kind", "axis", "dtype", "phase"):
        table.add_column(name, no_wrap=name != "axis", overflow="fold")
    for name in ("count", "payload", "wire/rank"):
        table.add_column(name, justify="right", no_wrap=True)
    sums = ledger.total_by("kind", "axis", "dtype", "phase")
    for key, total in sums.items():
        table.add_row(
            *(Text(str(part)) for part in key),
            str(total.count),
            format_bytes(total.payload_bytes),
            format_bytes(round(total.wire_bytes / num_ranks)),
        )
    return table


def change_table(changes: Sequence[Change], is_terminal: bool = False) -> Table:
    """One row for each module and kind that differs, alike ones of several in one."""
    table = plain_table("What changed", is_terminal)
    table.add_column("module", ratio=1)
    for name in ("kind", "axis", "phase"):
        table.add_column(name, no_wrap=True)
    for name in ("count", "payload"):
        table.add_column(name, justify="right", no_wrap=True)
    for path, change in _folded(changes):
        before, after = change.before, change.after
        # On a line of its own: the room is for paths.
        kind = change.kind + ("\n(implicit)" if change.implicit else "")
        table.add_row(
            ModulePath(path),
            kind,
            Text(change.axis),
            change.phase,
            f"{before.count} -> {after.count}",
            f"{format_bytes(before.payload_bytes)} -> {format_bytes(after.payload_bytes)}",
        )
    return table


def _folded(changes: Sequence[Change]) -> Iterator[tuple[str, Change]]:
    """Paths with the sum of their modules' changes, where those are equal."""
    rows = fold((change.module, replace(change, module="")) for change in changes)
    for path, change in rows:
        times = len(unfold(path))
        label = f"{path} x{times}" if times > 1 else path
        before, after = change.before * times, change.after * times
        yield label, replace(change, before=before, after=after)


def note_lines(ledger: Ledger) -> list[str]:
    """Sentences on what the numbers do not say."""
    lines = []
    total = ledger.total()
    if total.count == 0:
        lines.append("No communication was recorded.")
    implicit = ledger.total(implicit=True)
    if implicit.count:
        lines.append(
            f"{implicit.count} of {total.count} were implicit: DTensor redistributed an "
            f"operand by itself ({format_bytes(implicit.payload_bytes)} payload)."
        )
        lines += [f"  {times} x {cause}" for cause, times in _causes(ledger).items()]
    checks = ledger.total(check=True)
    if checks.count:
        lines.append(
            f"{checks.count} of {total.count} belong to checks, not to training."
        )
    return lines + ledger.note_lines()


def _causes(ledger: Ledger) -> dict[str, int]:
    causes: dict[str, int] = {}
    for event in ledger.events:
        if event.implicit and event.cause is not None:
            text = f"{event.cause} in {event.module}, {event.phase.value}"
            causes[text] = causes.get(text, 0) + 1
    most = sorted(causes.items(), key=lambda item: -item[1])
    return dict(most[:5])


def plain_table(title: str, is_terminal: bool) -> Table:
    """An empty table in the style of all reports."""
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD if is_terminal else None,
        pad_edge=False,
        expand=False,
    )


def _print(console: Console, table: RenderableType) -> None:
    console.print(table)
    console.print()
