"""What one rank of a training script did: operators, storages, streams, in program order.

A recording holds no tensors and nothing of torch: it is data, for whoever adds memory up or
prices operators. One list has every event in the order in which the script's process issued
it; frees stand where the last reference went away.

Streams are small numbers: 0 is the device's default stream, others are numbered as they are
made. A collective runs on the stream of its communicator (``Comm.comm_stream``): it starts
after what its issuing stream held at that moment, and ``Wait`` makes a stream wait for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from torchspmd.comm import group_label
from torchspmd.rehearse.nodes import Nodes


class Phase(StrEnum):
    """What the script was doing."""

    INIT = "init"  # before the first call of a module
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"  # activation checkpointing, inside of backward
    OPTIMIZER = "optimizer"
    OTHER = (
        "other"  # between: losses outside of modules, logging, zero_grad, evaluation
    )


class Category(StrEnum):
    """What a storage was for, as far as the rehearsal can tell.

    The first one that applies, in this order. A storage that is none of these is an
    activation when ``saved`` (autograd kept it for backward), from set-up when it was made
    before the first module was called, else a temporary.
    """

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    BUFFER = "buffer"
    GATHERED_PARAMETER = "gathered parameter"  # FSDP: whole parameters of one group
    COMMUNICATION = "communication"  # FSDP's and DDP's buffers, results of collectives
    INPUT = "input"  # copied from the host
    ACTIVATION = "activation"
    SETUP = "made before training"  # averaged weights, data that stays on the device
    TEMPORARY = "temporary"


class Site(NamedTuple):
    """Where an event comes from. Sites are shared between events.

    Attributes:
        module: Path of the module, as in ``Llama.layers.3.mlp``; "" outside of modules.
        phase: What the script was doing.
        step: Optimizer steps finished before, so 0 in the first step.
        line: ``file:line function`` of the user's code; "" where there was none.
    """

    module: str
    phase: Phase
    step: int
    line: str


NOWHERE = Site("", Phase.INIT, 0, "")

# ----------------------------------------------------------------------------
# Memory


class Alloc(NamedTuple):
    """A new storage on the device.

    Attributes:
        storage: Its number, the key into ``Recording.storages``.
        nbytes: Bytes that were asked for, before the allocator rounds them up.
        stream: The stream that was current.
        op: ``number`` of the operator that made it; -1 outside of operators.
        site: Module, phase, step and line.
        workspace: True for memory that a kernel uses while it runs, and that no tensor
            shows: its ``Free`` follows at once.
    """

    storage: int
    nbytes: int
    stream: int
    op: int
    site: Site
    workspace: bool = False


class Free(NamedTuple):
    """The last reference to a storage went away, or it was resized to nothing."""

    storage: int


class RecordStream(NamedTuple):
    """``record_stream``: the storage, once freed, waits for what this stream holds."""

    storage: int
    stream: int


# ----------------------------------------------------------------------------
# Work


class TensorSpec(NamedTuple):
    """A tensor argument or result of an operator.

    Attributes:
        shape: Its local size.
        stride: In elements.
        dtype: As in ``bfloat16``.
        device: ``cuda`` or ``cpu``.
        storage: The storage's number; -1 for those on the host.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    storage: int


class Node(StrEnum):
    """What a node of autograd is for."""

    NONE = ""
    OPERATOR = "operator"
    GRADIENT = "gradient"


class Op(NamedTuple):
    """One operator that ran on the device (or copied from or to it).

    Attributes:
        number: Its place among operators and communications.
        name: As in ``aten.mm.default``.
        inputs: Tensor arguments, flattened, in order.
        outputs: Tensor results, flattened; those of in-place operators are inputs too.
        scalars: Arguments that are no tensors and that a cost depends on, by name, such as
            ``is_causal``, ``stride``, ``padding``, ``groups``.
        stream: The stream that was current.
        site: Module, phase, step and line.
        region: Number of the ``torch.compile`` region that it is fused into; None: eager.
        through: How the host got to it: ``eager``, ``dtensor``, ``thread``
            (beside the main one), or of a compiled step ``program`` (generated Python) or
            ``compiled`` (code of Inductor); ``graph`` where a CUDA graph is replayed,
            ``replay`` of a region that is one.
        views: Whether it launches nothing: its results are views of its arguments.
        calls: Python calls of the script and its modules since the operator before.
        node: Which node of autograd begins with it, in backward: none, one of an
            operator, or one that hands a gradient to a parameter.
        repeats: ``number`` of the captured operator that a replay does again; -1: none.
    """

    number: int
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    scalars: tuple[tuple[str, object], ...]
    stream: int
    site: Site
    region: int | None = None
    through: str = "eager"
    views: bool = False
    calls: int = 0
    node: Node = Node.NONE
    repeats: int = -1


# Ways of compiled steps: without modules, autograd and its thread.
OF_PROGRAM = frozenset({"program", "compiled", "graph"})


class Comm(NamedTuple):
    """One communication, issued from ``stream``, run on ``comm_stream``.

    Attributes:
        number: Its place among operators and communications.
        kind: As in ``all_gather``, ``reduce_scatter``, ``send``.
        op: ``namespace.name`` of the operator.
        group: Name of the process group.
        ranks: Global ranks of the group, in its order.
        axis: The mesh axis that owns the group; None when no mesh does.
        payload_bytes: Bytes of the whole tensor, as the ledger counts them.
        dtype: Element type.
        inputs: What is sent.
        outputs: What is received.
        stream: The stream that was current: the communication starts after what it held.
        comm_stream: The communicator's stream, where it runs.
        is_async: False when the issuing stream waits for it at once.
        peer: The other rank of a send or receive; -1 for collectives.
        site: Module, phase, step and line.
    """

    number: int
    kind: str
    op: str
    group: str
    ranks: tuple[int, ...]
    axis: str | None
    payload_bytes: int
    dtype: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    stream: int
    comm_stream: int
    is_async: bool
    peer: int
    site: Site

    @property
    def label(self) -> str:
        """What tables call the group: its axis, else its ranks."""
        return self.axis or group_label(self.group, self.ranks)


# ----------------------------------------------------------------------------
# Order


class Wait(NamedTuple):
    """``stream`` waits for the communication of this number."""

    comm: int
    stream: int
    site: Site


class EventRecord(NamedTuple):
    """The event stands for all that ``stream`` holds now."""

    event: int
    stream: int


class EventWait(NamedTuple):
    """``stream`` waits for what the event stands for."""

    event: int
    stream: int


class StreamWait(NamedTuple):
    """``stream`` waits for all that ``other`` holds now."""

    stream: int
    other: int


BY_TORCH = ", by torch"
FROM_HOST = ", from the host"


class Synchronize(NamedTuple):
    """The host waits: for a stream, for an event, or for all (both None).

    Attributes:
        stream: The stream.
        event: The event.
        reason: The call, as in ``torch.cuda.synchronize`` or ``aten._local_scalar_dense``;
            ends with ``BY_TORCH`` where the script did not ask for it, and with
            ``FROM_HOST`` where it copies to the device and waits until that is done.
    """

    stream: int | None
    event: int | None
    reason: str

    @property
    def reads_value(self) -> bool:
        """Whether the script asks for a value; other waits are there for their own sake."""
        is_asked_for = not self.reason.endswith((BY_TORCH, FROM_HOST))
        return is_asked_for and not self.reason.startswith("torch.cuda")

    @property
    def copies_to_device(self) -> bool:
        """Whether the host waits until its memory was read."""
        return self.reason.endswith(FROM_HOST)


class MarkKind(StrEnum):
    """What a mark says."""

    INIT_END = "init end"  # the first module is called
    STEP_BEGIN = "step begin"  # value: the step's number, from 0
    STEP_END = "step end"  # optimizer.step() has returned; the value is the same
    RESET_PEAK = "reset peak"  # torch.cuda.reset_peak_memory_stats()
    EMPTY_CACHE = "empty cache"  # torch.cuda.empty_cache()
    # A pass of a model that is trained, in eval mode and without gradients.
    EVALUATION_BEGIN = "evaluation begin"
    EVALUATION_END = "evaluation end"
    # A CUDA graph is captured; value: the number of the pool that its memory is of.
    CAPTURE_BEGIN = "capture begin"
    CAPTURE_END = "capture end"
    REPLAY_BEGIN = "replay begin"
    REPLAY_END = "replay end"
    SCRIPT_END = "script end"


class Mark(NamedTuple):
    """A point in the script's run."""

    kind: MarkKind
    value: int
    phase: Phase = Phase.OTHER


Event: TypeAlias = (
    Alloc
    | Free
    | RecordStream
    | Op
    | Comm
    | Wait
    | EventRecord
    | EventWait
    | StreamWait
    | Synchronize
    | Mark
)

# ----------------------------------------------------------------------------


@dataclass(slots=True)
class StorageInfo:
    """One storage on the device, filled in while the script runs.

    Attributes:
        nbytes: Its size; the last one, where it was resized (each size has an ``Alloc``).
        category: What it was for; see ``Category``.
        name: Name of the parameter, gradient, state or buffer, as in
            ``Llama.layers.0.wq.weight``; "" for others.
        module: The module that made it.
        saved: Whether autograd kept it for backward.
        returned: Whether a compiled region gave it to its caller.
        site: Where it was allocated.
        parts: Of the named tensors in it: their module and bytes, by name. Several share
            one storage where a group's gradients are one buffer, as in FSDP2 and DDP.
    """

    nbytes: int
    category: Category = Category.TEMPORARY
    name: str = ""
    module: str = ""
    saved: bool = False
    returned: bool = False
    site: Site = NOWHERE
    parts: dict[str, tuple[str, int]] = field(default_factory=dict)

    def bytes_by_module(self) -> Iterator[tuple[str, int]]:
        """Modules with their bytes of it; what no named tensor has is its own module's."""
        own = self.module or self.site.module
        named = sum(nbytes for _, nbytes in self.parts.values())
        if named > self.nbytes:  # views of one another, as tied parameters are
            yield own, self.nbytes
            return
        yield from self.parts.values()
        if named < self.nbytes:
            yield own, self.nbytes - named


class ModuleFacts(NamedTuple):
    """A module that was called.

    Attributes:
        type: Its class.
        parameters: Elements of its parameters and of those inside it, over all ranks.
    """

    type: str
    parameters: int


@dataclass(slots=True)
class Recording:
    """All that one rank did.

    Attributes:
        world_size: Ranks of the rehearsed world.
        rank: The one that was played.
        nodes: Which node each rank is on.
        events: In program order.
        storages: Every storage that was ever on the device, by number.
        streams: What each stream is for: ``default``, ``user``, ``communicator dp``.
        groups: Process groups that communicated: ranks by name.
        notes: What was assumed.
        skipped: What was not done.
        steps: Optimizer steps that the events have, finished ones.
        parts: How many of them, at the beginning, were parts of the first round of several
            optimizers, before its last one.
        unsteady: The last step, from 0, in which a CUDA graph was captured, that ran on a
            side stream as before a capture, or whose gradients had no buckets yet;
            -1: none.
        modules: Modules that were called, by path, parents first.
        axes: Sizes of the axes of the script's meshes, by name.
        clears_first: Whether the script clears gradients before it computes them, and so
            keeps them between two steps.
        can_fuse: Whether all optimizers that made a step take ``fused=True``.
    """

    world_size: int = 1
    rank: int = 0
    nodes: Nodes = field(default_factory=Nodes)
    events: list[Event] = field(default_factory=list)
    storages: dict[int, StorageInfo] = field(default_factory=dict)
    streams: dict[int, str] = field(default_factory=lambda: {0: "default stream"})
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    steps: int = 0
    parts: int = 0
    unsteady: int = -1
    modules: dict[str, ModuleFacts] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)
    clears_first: bool = False
    can_fuse: bool = True

    @property
    def warms_up(self) -> bool:
        """Whether no step is finished yet that is like all that follow."""
        return self.unsteady >= 0 and self.steps < self.unsteady + 2

    @property
    def num_operators(self) -> int:
        """How many operators the events have."""
        return sum(isinstance(event, Op) for event in self.events)
