"""What the fixture ``comm_ledger`` gives: a ledger that fills while the test runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from torchspmd.comm import Ledger, format_bytes
from torchspmd.trace import CommDebugMode
from torchspmd.trace.calls import follow, unfollow

_MAX_EVENTS = 1_000_000


@contextmanager
def recording() -> Iterator[Ledger]:
    """Record what is done inside, from the first module call on."""
    with CommDebugMode(sources=True, max_events=_MAX_EVENTS) as mode:
        start = _Start(mode.ledger)
        follow(start)
        try:
            yield mode.ledger
        finally:
            unfollow(start)


class _Start:
    """Empties a ledger at the first module call."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._begun = False

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        if self._begun:
            return
        self._begun = True
        setup = self._ledger.total()
        # The test holds this very ledger already, so it is begun anew, not replaced.
        Ledger.__init__(self._ledger, max_events=self._ledger.max_events)
        if setup.count:
            self._ledger.note(
                f"what was sent before the first module call is left out: {setup.count} "
                f"communications, {format_bytes(setup.payload_bytes)} payload"
            )

    def leave(self) -> None:
        """A module's call ends: nothing to do."""
