"""Ranks that go back to another program do so together.

Programs are compared when they are made. A rank that has several may run one while another
rank runs the next: that is harmless where both send the same for the same states, as for
batches of other shapes whose gradients are reduced. Otherwise ranks would take each other's
bytes for something else, or wait for what never comes.
"""

from collections.abc import Iterator
from typing import Protocol, final

import torch.distributed as dist
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Ledger
from torchspmd.errors import AgreementError
from torchspmd.step.agreement import exchange
from torchspmd.step.graph.ledger import events_of, peers_of
from torchspmd.step.graph.roles import output_values, readable_name, written_state

SECONDS = 600.0  # between the first rank that takes up a program and the last

_Facts = tuple[object, ...]


class _Program(Protocol):
    number: int
    ledger: Ledger
    graph: fx.GraphModule


@final
class Switches:
    """Which of the programs that communicate a step ran last.

    What is decided here depends on programs that all ranks have made together, so that
    ranks which call the same steps exchange numbers at the same calls.

    Args:
        name: The step's name.
        key: Which step of that name it is.
    """

    def __init__(self, name: str, key: str) -> None:
        self._name, self._key = name, key
        self._facts: dict[int, _Facts] = {}  # by program; those may be let go of
        self._latest: int | None = None
        self._count = 0

    def to_new(self, program: _Program) -> None:
        """Ranks have just made this program, and met for it."""
        if len(program.ledger):
            self._facts[program.number] = _facts(program)
            self._latest = program.number

    def to_known(self, program: _Program) -> None:
        """Raise unless all ranks that it communicates with take up this program as well.

        One that sends nothing may come between: steps for micro-batches take turns.
        """
        if program.number == self._latest or not len(program.ledger):
            return
        latest, self._latest = self._latest, None  # after a failure ranks meet again
        if latest is None or self._facts[latest] != self._facts[program.number]:
            self._meet(program)
        self._latest = program.number

    def _meet(self, program: _Program) -> None:
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
        if not missing and set(numbers.values()) == {str(program.number)}:
            return
        told = [f"rank {rank} runs program {n}" for rank, n in sorted(numbers.items())]
        told += [f"rank {n} runs another after {SECONDS:g} s" for n in missing]
        lines = "\n".join(f"  * {line}" for line in told)
        raise AgreementError(
            f"compile on {self._name!r}: ranks would run programs that do not send the "
            f"same.\n\n{lines}\n\nGive every rank batches of the same shape, and the same "
            "other arguments, in every step; with uneven batches, pad or drop the last one."
        )


def _facts(program: _Program) -> _Facts:
    """What a program sends, in order, and for which of its outputs."""
    graph = program.graph.graph
    sent = [
        (event.kind, event.group.name, event.dtype, event.shape)
        for event in program.ledger.events
    ]
    needed: dict[fx.Node, int] = {}  # a bit for each collective that a node depends on
    starts = {node: 1 << place for place, (node, _) in enumerate(events_of(graph))}
    for node in graph.nodes:
        needed[node] = starts.get(node, 0)
        for source in node.all_input_nodes:
            needed[node] |= needed[source]
    outputs = [
        (place, needed[value])
        for place, value in _named_outputs(graph)
        if needed[value]
    ]
    return (*sent, *outputs)


def _named_outputs(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    states = written_state(graph)
    for place, value in enumerate(output_values(graph)):
        if isinstance(value, fx.Node):
            state = states.get(place)
            yield readable_name(state) if state else f"output {place}", value
