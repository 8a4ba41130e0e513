"""Progress of long work, on standard error: a moving line, or a plain one in a log."""

from types import TracebackType
from typing import Self

from rich.console import Console


class Progress:
    """Says what is being done; quiet for ranks that do not report."""

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self._what = what
        self._console = Console(stderr=True, quiet=quiet)
        self._status = self._console.status(what)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        else:
            self._console.print(f"{self._what} ...", highlight=False, markup=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._status.stop()

    def step(self, number: int, of: int) -> None:
        """One more step has begun."""
        if self._console.is_terminal:
            total = f" of {of}" if of else ""
            self._status.update(f"{self._what}, step {number}{total}")
