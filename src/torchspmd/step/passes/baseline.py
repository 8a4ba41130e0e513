"""Whether deferring is worth it: a step as it came, and what leaving updates costs.

To overlap reductions with the next forward has a cost: an optimizer that is split has more
and smaller updates, which take the device and Python longer. That cost does not shrink on a
faster machine, as everything else does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from torch import fx

from torchspmd.step.graph.cost import CostModel, device_of
from torchspmd.step.passes.pacing import estimate

# What Python takes, in launches of an operator: around any node; and for each update that
# waits, to leave it, to note that it is made and to write it.
_NODE_LAUNCHES = 1.5
_JOB_LAUNCHES = 6.0
# What one more update takes on a GPU, in launches besides its own: a short list of tensors
# does not fill the device.
_UPDATE_LAUNCHES = 3.0
# How many times as fast as guessed a machine may be.
_FASTER = 6.0
_COUNTS = 0.005  # of a step: what is less is not worth a look

T = TypeVar("T")


def machines(
    cost: CostModel | None, device: str, *, is_doubted: bool
) -> list[CostModel]:
    """Where deferring is simulated: on what was given, or on a guess.

    Args:
        cost: What was given or measured; None for a guess.
        device: The type of device.
        is_doubted: Whether a guess counts only with a machine that is much faster.
    """
    if cost is not None:
        return [cost]
    guess = CostModel.for_device(device)
    faster = replace(
        guess,
        flops=guess.flops * _FASTER,
        memory_bytes=guess.memory_bytes * _FASTER,
        network_bytes=guess.network_bytes * _FASTER,  # a guess has one for all axes
    )
    return [guess, faster] if is_doubted else [guess]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A step without deferred work on one machine.

    Python counts in full on a CPU, where nothing is overlapped with it; on a GPU, where
    everything is, only if it takes longer than all else.

    Attributes:
        cost: The machine.
        device: What the step computes on.
        num_nodes: Of the graph as it came.
        simulated: Seconds that its nodes are simulated to take.
    """

    cost: CostModel
    device: str
    num_nodes: int
    simulated: float

    @classmethod
    def of(cls, graph: fx.Graph, cost: CostModel) -> Self:
        """The step before any of it is deferred."""
        return cls(cost, device_of(graph), len(graph.nodes), estimate(graph, cost))

    @property
    def seconds(self) -> float:
        """How long the step takes."""
        if self.device == "cpu":
            return self.simulated
        launches = self.num_nodes * _NODE_LAUNCHES
        return max(self.simulated, launches * self.cost.launch_seconds)

    def steady_seconds(self, simulated: float, num_nodes: int, num_jobs: int) -> float:
        """How long it takes with optimizers that are split, and updates that are left."""
        launch = self.cost.launch_seconds
        more = (num_nodes - self.num_nodes) * _NODE_LAUNCHES + num_jobs * _JOB_LAUNCHES
        if self.device == "cpu":
            return simulated + max(0.0, more) * launch
        split = (num_jobs - 1) * _UPDATE_LAUNCHES
        host = self.num_nodes * _NODE_LAUNCHES + more
        return max(simulated + split * launch, host * launch)

    def counts(self, num_jobs: int) -> bool:
        """Whether so many updates cost anything worth counting."""
        launches = (num_jobs - 1) * _JOB_LAUNCHES
        return launches * self.cost.launch_seconds > _COUNTS * self.seconds

    def joined_seconds(self, num_updates: int) -> float:
        """What is saved on the device when so many updates become one."""
        return (num_updates - 1) * self.cost.launch_seconds


def neighbours(count: int) -> list[int]:
    """How many neighbouring updates of so many may be joined.

    >>> neighbours(10)
    [1, 2, 4, 8, 10]
    """
    sizes = [2**power for power in range(count.bit_length()) if 2**power < count]
    return [*sizes, count]


def in_groups(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Neighbours together.

    >>> in_groups(["a", "b", "c"], 2)
    [['a', 'b'], ['c']]
    """
    return [items[at : at + size] for at in range(0, len(items), size)]
