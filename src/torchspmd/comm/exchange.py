"""Ranks exchange texts through a store, without a collective.

Ranks that disagree cannot complete a collective. torch's own exchange
(``torch.distributed.elastic.utils.store``) waits for all ranks or none: it neither returns
what did arrive nor stops when a rank reports that it has failed.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchspmd import _torch
from torchspmd.errors import AgreementError

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.2  # seconds between two reads of the store
_LONGER = 1.25  # each pause than the one before: a text is read after a fifth too long


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What came of an exchange.

    Attributes:
        texts: The texts that came, by rank.
        seconds: How long ranks were waited for at most.
        missing: The ranks that did not come.
        failures: Why they do not come, as far as they said so.
    """

    texts: Mapping[int, str]
    seconds: float
    missing: tuple[int, ...] = ()
    failures: Mapping[int, str] = field(default_factory=dict)

    def require_all(self, what: str, rule: str) -> Mapping[int, str]:
        """The texts; raise where a rank did not come.

        >>> try:
        ...     Exchanged({0: ""}, 60.0, (1, 3)).require_all("lock", "Call it on all.")
        ... except AgreementError as error:
        ...     print(error)
        lock: ranks 1, 3 did not come within 60 s. Call it on all.
        """
        if not self.missing:
            return self.texts
        ranks = ", ".join(map(str, self.missing))
        noun = "rank" if len(self.missing) == 1 else "ranks"
        raise AgreementError(
            f"{what}: {noun} {ranks} did not come within {self.seconds:g} s. {rule}"
        )


def exchange(
    store: _torch.Store,
    rank: int,
    text: str,
    ranks: Sequence[int],
    key: str,
    seconds: float,
    failures: str = "",
) -> Exchanged:
    """Post a text in a store and read those of other ranks.

    Args:
        store: What all of them can read.
        rank: This rank.
        text: What it posts.
        ranks: Whose texts to read; none to post only.
        key: The same on every rank, used once.
        seconds: How long to wait for all of them together.
        failures: Where a rank posts why it does not come (``post_failure``); once one
            has, no rank is waited for any more.
    """
    store.set(f"{key}/{rank}", text)
    end, pause = time.monotonic() + seconds, _FIRST_PAUSE
    failed: dict[int, str] = {}
    while missing := [each for each in ranks if not store.check([f"{key}/{each}"])]:
        failed = _read(store, missing, failures) if failures else {}
        if failed or time.monotonic() > end:
            break
        time.sleep(pause)
        pause = min(_LONGER * pause, _LONGEST_PAUSE)
    texts = _read(store, [each for each in ranks if each not in missing], key)
    return Exchanged(texts, seconds, tuple(missing), failed)


def post_failure(
    store: _torch.Store, rank: int, failures: str, error: BaseException
) -> None:
    """Tell ranks that wait for this one in ``exchange`` that it does not come."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    store.set(f"{failures}/{rank}", text)


def _read(store: _torch.Store, ranks: Sequence[int], key: str) -> dict[int, str]:
    """The texts that are there already."""
    return {
        rank: store.get(f"{key}/{rank}").decode()
        for rank in ranks
        if store.check([f"{key}/{rank}"])
    }
