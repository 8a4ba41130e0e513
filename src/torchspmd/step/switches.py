"""Ranks that take up another program again do so together.

Programs are compared when they are made. A rank that has several may run one while another
rank runs the next: that is harmless where both send the same, such as gradients. But where
what is sent depends on the batch, one rank would gather another's bytes as its own.
"""

from typing import Protocol, final

import torch.distributed as dist
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Ledger
from torchspmd.errors import AgreementError
from torchspmd.step.agreement import exchange
from torchspmd.step.graph.ledger import peers_of

SECONDS = 600.0  # between the first rank that takes up a program and the last

_Fact = tuple[object, object]  # what is sent where, and how much


class _Program(Protocol):
    number: int
    ledger: Ledger
    graph: fx.GraphModule


@final
class Switches:
    """Which program a step ran last.

    Args:
        name: The step's name.
        key: Which step of that name it is.
    """

    def __init__(self, name: str, key: str) -> None:
        self._name, self._key = name, key
        self._latest: int | None = None
        self._sent: list[_Fact] = []  # by that; the program itself may be let go of
        self._count = 0

    def to_new(self, program: _Program) -> None:
        """Ranks have just made this program, and met for it."""
        self._latest, self._sent = program.number, _sends(program)

    def to_known(self, program: _Program) -> None:
        """Raise unless all ranks that it communicates with take up this program as well."""
        if program.number == self._latest:
            return
        earlier = self._sent
        self.to_new(program)
        if not _may_be_mixed(earlier, self._sent):
            return
        self._count += 1
        if not dist.is_initialized() or dist.get_backend() == "fake":
            return
        ranks = sorted({dist.get_rank(), *peers_of(program.graph)})
        key = f"torchspmd/step/{self._name}/{self._key}/switch"
        numbers, missing = exchange(
            str(program.number), ranks, f"{key}/{self._count}", seconds=SECONDS
        )
        # Whoever came to this switch has read all that was posted for the last but one.
        _torch.default_store().delete_key(f"{key}/{self._count - 2}/{dist.get_rank()}")
        other = {n for n in numbers.values() if n != str(program.number)}
        if not missing and not other:
            return
        told = [f"rank {rank} runs program {n}" for rank, n in sorted(numbers.items())]
        told += [f"rank {n} runs another after {SECONDS:g} s" for n in missing]
        lines = "\n".join(f"  * {line}" for line in told)
        raise AgreementError(
            f"compile on {self._name!r}: ranks would run programs that do not send the "
            f"same.\n\n{lines}\n\nGive every rank batches of the same shape in every step; "
            "with uneven batches, pad or drop the last one."
        )


def _sends(program: _Program) -> list[_Fact]:
    return [
        ((event.kind, event.group.name), (event.dtype, event.shape))
        for event in program.ledger.events
    ]


def _may_be_mixed(one: list[_Fact], two: list[_Fact]) -> bool:
    """Whether programs send the same kinds of things, but of other sizes.

    Programs of other kinds, such as those that only add up gradients, take turns.
    """
    is_alike = [kind for kind, _ in one] == [kind for kind, _ in two]
    return is_alike and one != two
