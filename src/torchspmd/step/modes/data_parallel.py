"""How a step is spread over ranks: what a module sees for each tensor, who reduces."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchspmd import _torch
from torchspmd.errors import CaptureError, UsageError, WorldError
from torchspmd.step.capture.inventory import Inventory, Role, Slot
from torchspmd.step.graph.metadata import OwnerLog
from torchspmd.step.modes.shard_layout import sign_parameters
from torchspmd.step.progress import phase

if TYPE_CHECKING:
    from torchspmd.step.modes.shard_layout import Relayout


@final
@dataclass(frozen=True, slots=True)
class DataParallel:
    """Each rank computes on its own batch; gradients are reduced explicitly.

    Args:
        parallel_style: ``"replicate"``: every rank holds all parameters.
            ``"fully_shard"``: each rank holds a share of every parameter and of its
            optimizer state, and gathers the whole where the step uses it.
        reduce: ``"avg"`` divides the sum of the gradients by the number of ranks, as
            DistributedDataParallel does; ``"sum"`` does not.
        reshard_after_forward: Of ``"fully_shard"``: gather again in backward, instead of
            keeping the whole parameters from forward on.
        sync_each_backward: Of ``"fully_shard"``: reduce gradients in each backward. False
            reduces once what several backwards add up (micro-batches), and keeps whole
            gradients until then; parameters that are kept whole are gathered once.

    Example:
        >>> DataParallel("fully_shard").reduce
        'avg'
    """

    parallel_style: str = "replicate"
    reduce: Literal["avg", "sum"] = "avg"
    reshard_after_forward: bool = True
    sync_each_backward: bool = True

    def __post_init__(self) -> None:
        if self.parallel_style not in ("replicate", "fully_shard"):
            raise UsageError(
                f"DataParallel: Unknown parallel style: {self.parallel_style!r}. "
                "Choose 'replicate' or 'fully_shard'."
            )
        if self.reduce not in ("avg", "sum"):
            raise UsageError(
                f"DataParallel(reduce={self.reduce!r}): choose 'avg' or 'sum'."
            )
        if self.parallel_style == "replicate" and not self.sync_each_backward:
            raise UsageError(
                "DataParallel('replicate', sync_each_backward=False): this style reduces "
                "micro-batches once by itself; leave the argument out."
            )
        if self.parallel_style == "replicate" and not self.reshard_after_forward:
            raise UsageError(
                "DataParallel('replicate', reshard_after_forward=False) would have no "
                "effect: this style keeps whole parameters at all times; leave the "
                "argument out."
            )


class Spread(ABC):
    """What one mode does to the tensors of a step while it is traced."""

    mesh: DeviceMesh | None
    takes_layouts = True  # whether parameters may be DTensors already
    is_compared = False  # whether ranks were found to hold the same parameters
    reduces = False  # whether ranks hold whole parameters, and reduce their gradients

    def lay_out(self, inventory: Inventory) -> "Relayout | None":
        """Other tensors for those of the step, to be put in place after capture."""
        return None

    def values(
        self, inventory: Inventory, relayout: "Relayout | None"
    ) -> tuple[str, ...]:
        """A checksum of each tensor that must be equal along the data axis.

        A pass over all parameters: taken until a program was made, and not again.
        """
        if relayout is not None:
            return tuple(fact.text for fact in relayout.facts)
        if self.mesh is None or not self.reduces or self.is_compared:
            return ()
        with phase("checksums"):
            return sign_parameters(inventory, self.mesh)

    def installed(
        self, inventory: Inventory, shown: list[torch.Tensor], log: OwnerLog
    ) -> contextlib.AbstractContextManager[None]:
        """What must hold while the user's objects have traced tensors."""
        return contextlib.nullcontext()

    def check(self, traced: fx.GraphModule) -> None:
        """Refuse a traced step that this mode would get wrong."""
        return

    def finish(self, graph: fx.GraphModule) -> int:
        """Change the functional graph of the step; how many reductions were joined."""
        return 0

    @abstractmethod
    def show(self, slot: Slot, local: torch.Tensor) -> torch.Tensor:
        """What the user's code sees for a traced tensor of this rank."""

    @abstractmethod
    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient that backward has just made, reduced over the ranks."""

    def for_optimizer(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A gradient in the parameter's layout, for an optimizer on plain tensors."""
        gradient = parameter.grad
        if gradient is None:
            return None
        wanted, found = _torch.layout_of(parameter), _torch.layout_of(gradient)
        if (wanted is None) != (found is None):
            raise CaptureError(
                "compile: the step sets the grad of a DTensor parameter to a plain tensor, "
                "or of a plain one to a DTensor. Keep the gradient that backward made, or "
                "give it the parameter's layout with distribute_tensor()."
            )
        if wanted is not None and found.placements != wanted.placements:
            moved: Any = gradient
            gradient = moved.redistribute(placements=wanted.placements)
        return _torch.finished(_torch.plain_tensor(gradient))

    @abstractmethod
    def result(self, value: torch.Tensor) -> torch.Tensor:
        """What the caller gets for a value that the step returns."""

    @abstractmethod
    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """What must hold while the step is traced."""


@final
class OneDevice(Spread):
    """No mesh: the step as it is written, with the layouts that its tensors have."""

    mesh = None

    def show(self, slot: Slot, local: torch.Tensor) -> torch.Tensor:
        """The tensor, with the layout that the user gave it."""
        return as_laid_out(slot, local)

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Nothing to do."""
        return gradient

    def result(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor, or this rank's shard of it."""
        return _torch.plain_tensor(value)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Nothing special."""
        yield


@final
class ReplicatedData(Spread):
    """Ranks compute on plain tensors; gradients are summed over the mesh, or averaged."""

    reduces = True

    def __init__(self, mesh: DeviceMesh, reduce: Literal["avg", "sum"]) -> None:
        self.mesh: DeviceMesh = mesh
        self._reduce = reduce

    def show(self, slot: Slot, local: torch.Tensor) -> torch.Tensor:
        """The tensor, with the layout that the user gave it."""
        return as_laid_out(slot, local)

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sum the gradient over the data axis; divide where an average was asked for."""
        layout = _torch.layout_of(gradient)
        total = _torch.sum_over(_torch.plain_tensor(gradient), self.mesh.get_group())
        if self._reduce == "avg":  # gloo has no average: the sum is scaled everywhere
            total = total / self.mesh.size()
        return total if layout is None else _torch.wrap_local(total, layout)

    def result(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's own value."""
        return _torch.plain_tensor(value)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Nothing special."""
        yield


def resolve_spread(
    parallel_mode: DataParallel | None, mesh: DeviceMesh | None, device: torch.device
) -> Spread:
    """The mode and the mesh that a call of ``compile`` asks for."""
    if parallel_mode is not None and not isinstance(parallel_mode, DataParallel):
        raise UsageError(
            f"compile(parallel_mode={parallel_mode!r}): pass a DataParallel, or None for "
            "the meaning of one device."
        )
    if mesh is not None and mesh.ndim != 1:
        raise UsageError(
            f"compile(mesh=...): the mesh has {mesh.ndim} axes {mesh.mesh_dim_names}; "
            "pass its data axis alone, for instance mesh['dp']."
        )
    if mesh is None and dist.is_initialized():
        names = ("data",)
        mesh = init_device_mesh(
            device.type, (dist.get_world_size(),), mesh_dim_names=names
        )
    if parallel_mode is not None:
        if mesh is None:
            raise WorldError(
                f"compile(parallel_mode={parallel_mode}): there is no process group. "
                "Call torch.distributed.init_process_group() first."
            )
        if parallel_mode.parallel_style == "replicate":
            return ReplicatedData(mesh, parallel_mode.reduce)
        from torchspmd.step.modes.fully_shard import FullyShardedData

        return FullyShardedData(
            mesh,
            parallel_mode.reduce,
            reshard_after_forward=parallel_mode.reshard_after_forward,
            sync_each_backward=parallel_mode.sync_each_backward,
        )
    if mesh is None:
        return OneDevice()
    from torchspmd.step.modes.global_batch import OneMeaning

    return OneMeaning(mesh)


def check_layouts(spread: Spread, slots: list[Slot]) -> None:
    """The default mode lays tensors out itself; a model that has layouts needs a choice."""
    if spread.takes_layouts:
        return
    laid_out = [
        slot.name
        for slot in slots
        if slot.role is not Role.INPUT and _torch.layout_of(slot.tensor) is not None
    ]
    if laid_out:
        raise CaptureError(
            f"compile: {laid_out[0]} and {len(laid_out) - 1} more tensors are DTensors "
            "already, and the default mode would lay plain ones out over "
            f"{spread.mesh}. Pass parallel_mode=DataParallel('replicate', "
            "reduce='avg' or 'sum') with mesh=mesh['dp'], the axis that gradients are "
            "reduced over."
        )


def as_laid_out(slot: Slot, local: torch.Tensor) -> torch.Tensor:
    """A traced tensor in the layout that the user's tensor has."""
    layout = _torch.layout_of(slot.tensor)
    return local if layout is None else _torch.wrap_local(local, layout)
