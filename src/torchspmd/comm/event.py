"""One communication, as a value."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from torchspmd.comm.kinds import Kind

# The module name of whatever runs outside every module.
GLOBAL = "Global"


class Phase(StrEnum):
    """Which part of a training step is running.

    >>> Phase("backward") is Phase.BACKWARD
    True
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"


# Under this key, a node of a captured graph has its Owner in its metadata.
OWNER_KEY = "torchspmd_owner"


class Owner(NamedTuple):
    """The phase of the step and the module that a node of a captured graph is from."""

    phase: Phase = Phase.FORWARD
    module: str = GLOBAL


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that take part in one communication.

    Attributes:
        name: The process group's name in torch.
        ranks: Global ranks, in group order; empty when torch could not tell.
        axis: Name of the mesh axis that owns the group; None when no DeviceMesh does.
        label: What tables show: the axis, else the ranks.
    """

    name: str
    ranks: tuple[int, ...]
    axis: str | None = None
    label: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self._describe())

    def __hash__(self) -> int:
        # Not of the ranks: hashing a thousand each time is slow.
        return hash((self.name, self.axis))

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self.ranks)

    def _describe(self) -> str:
        if self.axis is not None:
            return self.axis
        return group_label(self.name, self.ranks)


def group_label(name: str, ranks: tuple[int, ...]) -> str:
    """What tables call a group that no mesh owns.

    >>> group_label("12", (0, 8, 16)), group_label("12", ())
    ('ranks 0-16 step 8', 'group 12')
    """
    return f"ranks {_ranges(ranks)}" if ranks else f"group {name}"


def of_axis(label: str) -> str:
    """A label in a sentence.

    >>> of_axis("tp"), of_axis("ranks 0-7")
    ('of axis tp', 'of ranks 0-7')
    """
    is_group = label.startswith(("ranks ", "group "))
    return f"of {label}" if is_group else f"of axis {label}"


class CommEvent(NamedTuple):
    """One communication of one rank.

    A named tuple, because one is made for every communication of a running program and a
    frozen dataclass takes several times as long to make and to hash.

    Attributes:
        kind: What it does.
        op: ``namespace.name`` of the operator packet it is counted under.
        dtype: Element type, as in ``float32``; ``mixed`` for several.
        shape: Shape of the tensor this rank hands over; of several tensors, the number
            of elements together.
        payload_bytes: Size of the whole logical buffer: the gathered tensor of an
            all-gather, the unreduced input of a reduce-scatter.
        wire_bytes: What one rank sends, on average over the group, in a ring.
        group: Who takes part, and the mesh axis.
        phase: Forward, backward, recompute or optimizer.
        module: Path of the module it was done for, ``Global`` outside modules.
        implicit: DTensor redistributed an operand by itself to run an operator.
        cause: The redistribution behind it, where DTensor did it.
        source: ``file:line function`` of the user's code, where it was asked for.
        compiled: It ran inside a region compiled by torch.compile.
        check: It belongs to a check, not to training; see ``marked_as_check``.

    >>> group = Group("0", (0, 1), "tp")
    >>> event = CommEvent(
    ...     Kind.ALL_REDUCE, "c10d.allreduce_", "float32", (4,), 16, 16, group
    ... )
    >>> event.axis, event.phase.value, event.module
    ('tp', 'forward', 'Global')
    """

    kind: Kind
    op: str
    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int
    wire_bytes: int
    group: Group
    phase: Phase = Phase.FORWARD
    module: str = GLOBAL
    implicit: bool = False
    cause: str | None = None
    source: str | None = None
    compiled: bool = False
    check: bool = False

    @property
    def axis(self) -> str:
        """The group's label: a mesh axis, or its ranks."""
        return self.group.label


_checking: ContextVar[bool] = ContextVar("torchspmd_checking", default=False)


@contextmanager
def marked_as_check() -> Iterator[None]:
    """Mark the communication done inside as a check, so that counts can leave it out.

    >>> with marked_as_check():
    ...     is_check()
    True
    """
    token = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(token)


def is_check() -> bool:
    """Whether communication done now belongs to a check."""
    return _checking.get()


def _ranges(ranks: tuple[int, ...]) -> str:
    """Ranks as text: evenly spaced ones as ``first-last`` or ``first-last step n``."""
    if len(ranks) < 3:
        return ",".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    if step <= 0 or ranks != tuple(range(ranks[0], ranks[-1] + 1, step)):
        return ",".join(map(str, ranks))
    return f"{ranks[0]}-{ranks[-1]}" + ("" if step == 1 else f" step {step}")
