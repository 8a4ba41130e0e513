"""What ranks are about to run, as values that can be compared."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import zip_longest

from torch import fx

from torchspmd.step.graph.ledger import communications

_SHOWN = 12  # differences in one message


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a rank.

    Attributes:
        text: Kind, dtype and shape.
        axis: What this rank calls the group. Ranks may know one group by several names.
        ranks: The members of the group.
    """

    text: str
    axis: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.text} over {self.axis} ({len(self.ranks)} ranks)"


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank is about to run.

    Attributes:
        collectives: Its collectives, in order.
        inputs: Its tensor arguments.
        values: Tensors that must be equal on all ranks, each with a checksum.
        deferred: What it leaves for the next step.
    """

    collectives: tuple[Collective, ...] = ()
    inputs: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The plan as it travels."""
        return json.dumps(astuple(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that ``to_json`` made a text of."""
        collectives, *others = json.loads(text)
        sent = tuple(Collective(a, b, tuple(ranks)) for a, b, ranks in collectives)
        return cls(sent, *map(tuple, others))


def build_plan(
    graph: fx.GraphModule,
    inputs: Sequence[str],
    values: Sequence[str] = (),
    deferred: Sequence[str] = (),
) -> Plan:
    """The plan of a graph; see ``Plan`` for the other arguments."""
    sent = tuple(
        Collective(
            f"{event.kind.value} {event.dtype}{list(event.shape)}" + _reduction(node),
            event.axis,
            event.group.ranks,
        )
        for node, event in communications(graph)
    )
    return Plan(sent, tuple(inputs), tuple(values), tuple(deferred))


def _reduction(node: fx.Node) -> str:
    return f" ({node.args[1]})" if isinstance(node.args[1], str) else ""


def differences(plans: Mapping[int, Plan]) -> list[str]:
    """One line for each rank and place where a plan does not go with the others.

    >>> four = Collective("all_reduce float32[4]", "dp", (0, 1))
    >>> five = Collective("all_reduce float32[5]", "dp", (0, 1))
    >>> differences({0: Plan((four,)), 1: Plan((five,))})[0][:65]
    'collective 0: rank 0 has all_reduce float32[4] over dp (2 ranks),'
    >>> differences({0: Plan((four,)), 1: Plan((replace(four, axis="data"),))})
    []
    """
    lines = [line for rank in plans for line in _compare(plans, rank)]
    lines = lines or list(_compare_groups(plans))
    rest = len(lines) - _SHOWN
    return lines if rest <= 0 else [*lines[:_SHOWN], f"and {rest} more differences"]


def differ_in_values_only(plans: Mapping[int, Plan]) -> bool:
    """Whether ranks run the same, on tensors that should be equal and are not."""
    return not differences({r: replace(plan, values=()) for r, plan in plans.items()})


def _compare(plans: Mapping[int, Plan], rank: int) -> Iterator[str]:
    """How a rank's plan differs from that of the first rank."""
    first, reference = next(iter(plans.items()))
    plan = plans[rank]
    for name, ours, theirs in (
        ("tensor argument", reference.inputs, plan.inputs),
        ("collective", reference.collectives, plan.collectives),
        ("values", reference.values, plan.values),
        ("deferred", reference.deferred, plan.deferred),
    ):
        for place, (a, b) in enumerate(zip_longest(ours, theirs)):
            if _essence(a) != _essence(b):
                yield (
                    f"{name} {place}: rank {first} has {a or 'none'}, rank {rank} has "
                    f"{b or 'none'}"
                )


def _essence(item: object) -> object:
    """What must be equal on ranks whose groups have other members and other names."""
    return (item.text, len(item.ranks)) if isinstance(item, Collective) else item


def _compare_groups(plans: Mapping[int, Plan]) -> Iterator[str]:
    """Where a rank counts on another one that sends to other ranks at that place."""
    for place in range(min(len(plan.collectives) for plan in plans.values())):
        sends = {rank: plan.collectives[place] for rank, plan in plans.items()}
        senders: dict[tuple[int, ...], set[int]] = {}
        for rank, collective in sends.items():
            senders.setdefault(collective.ranks, set()).add(rank)
        for members, there in senders.items():
            for absent in sorted({*members} & {*plans} - there):
                one = min(there)
                yield (
                    f"collective {place}: rank {one} has {sends[one]}, namely "
                    f"{list(members)}, rank {absent} has it over "
                    f"{list(sends[absent].ranks)}"
                )
