"""The path of a module in a narrow column: it breaks after dots, not inside of names."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text


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
