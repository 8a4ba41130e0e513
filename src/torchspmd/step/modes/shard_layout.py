"""Parameters, their gradients and their optimizer state, laid out as shards.

Everything is made beside the user's objects first; only when the step was captured and
all ranks agreed do the shards take the place of the plain tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.layout.retired import copy_attributes, note_predecessor
from torchspmd.layout.shards import full_shard_size, shard_bounds, shard_size
from torchspmd.step.capture.guards import name_of_hook
from torchspmd.step.capture.inventory import Inventory, Role, Slot
from torchspmd.step.capture.optimizer_rules import is_counter
from torchspmd.step.capture.parallel_mode import Checksum, Relayout
from torchspmd.step.capture.rank_divergence import checksums

# ----------------------------------------------------------------------------
# How a tensor is sharded over the data axis: what a rank keeps, and of which whole.
#
# A plain tensor is sharded by rows. Of a tensor that is laid out over another axis already
# (tensor parallel) each rank shards the rows of its own part, as torch's ``fully_shard``.


@dataclass(frozen=True, slots=True)
class DataAxes:
    """The axes of a mesh over which ranks have batches of their own.

    Attributes:
        shard: Its ranks hold shards of each parameter.
        replicas: Its ranks hold the same shards (hybrid sharding); None without such ranks.
        mesh: Both axes, as the user gave them; the first alone without replicas.
    """

    shard: DeviceMesh
    replicas: DeviceMesh | None
    mesh: DeviceMesh

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Self:
        """The axes of a mesh of one axis, or of two: replicas, and shards."""
        if mesh.ndim == 1:
            return cls(mesh, None, mesh)
        assert mesh.mesh_dim_names is not None and mesh.ndim == 2, mesh
        outer, inner = mesh.mesh_dim_names
        return cls(mesh[inner], mesh[outer], mesh)


@dataclass(frozen=True, slots=True)
class Sharding:
    """One tensor over the data axis, and over one other axis where it has one.

    Attributes:
        layout: Of the shard.
        whole: Of the gathered tensor over its other axis; None where that is plain.
        mesh: The data axis; of two, the one with shards.
        replicas: The other one.
        rows: Of the gathered tensor on this rank.
        is_sharded: Ranks keep rows; otherwise every rank keeps all of them.
        is_even: No rank of any axis has fewer rows than another.
    """

    layout: Any
    whole: Any
    mesh: DeviceMesh
    rows: int
    is_sharded: bool
    is_even: bool
    replicas: DeviceMesh | None = None

    @property
    def num_batches(self) -> int:
        """How many ranks have a batch of their own."""
        return self.mesh.size() * (self.replicas.size() if self.replicas else 1)

    @property
    def share(self) -> int:
        """The rows of the first ranks; the last ones may have fewer, or none."""
        return full_shard_size(self.rows, self.mesh.size())

    @property
    def kept(self) -> tuple[int, int]:
        """First and last row (excluded) of the gathered tensor that this rank keeps."""
        return shard_bounds(self.rows, self.mesh.size(), self.mesh.get_local_rank())


def plan_sharding(
    layout: Any, shape: tuple[int, ...], dtype: Any, axes: DataAxes
) -> Sharding:
    """The sharding of a tensor that is laid out over no axis, or over one other axis.

    ``find_layout_problem`` must have found nothing.
    """
    placements = [_data_placement(layout, shape)]
    joined = axes.mesh
    if axes.replicas is not None:
        placements.insert(0, _replicate())
    if layout is not None:
        placements += layout.placements
        axis = _torch.sister_axis(axes.shard, layout.mesh)
        assert axis is not None
        joined = _torch.join_axes(axes.shard, axis)
    sharding = read_sharding(
        _torch.build_spec(joined, tuple(placements), shape, dtype), axes
    )
    assert sharding is not None
    return sharding


def read_sharding(layout: Any, axes: DataAxes) -> Sharding | None:
    """The sharding that a layout describes; None for one that this mode does not make."""
    mesh = axes.shard
    if axes.replicas is not None:
        return _read_replicas(layout, axes)
    if layout.mesh.ndim == 2:
        return _read_two_axes(layout, mesh)
    if not is_over(layout, mesh):
        return None
    found = layout.placements[0]
    if not found.is_replicate() and not found.is_shard(0):
        return None
    rows = layout.shape[0] if layout.shape else 0
    is_even = rows % mesh.size() == 0
    return Sharding(layout, None, mesh, rows, not found.is_replicate(), is_even)


def _read_replicas(layout: Any, axes: DataAxes) -> Sharding | None:
    """The sharding of a tensor with replicas of its shards, laid out over no other axis."""
    if layout.mesh != axes.mesh or not layout.placements[0].is_replicate():
        return None
    found = layout.placements[1]
    if not found.is_replicate() and not found.is_shard(0):
        return None
    rows = layout.shape[0] if layout.shape else 0
    mesh, is_sharded = axes.shard, not found.is_replicate()
    is_even = rows % mesh.size() == 0
    return Sharding(layout, None, mesh, rows, is_sharded, is_even, axes.replicas)


def is_over(layout: Any, mesh: DeviceMesh) -> bool:
    """Whether a layout is one over the ranks of the data axis, and over no other axis."""
    same_ranks = bool(layout.mesh.mesh.tolist() == mesh.mesh.tolist())
    # Axes of one rank each have the same ranks.
    return same_ranks and _torch.sister_axis(mesh, layout.mesh) is None


def _read_two_axes(layout: Any, mesh: DeviceMesh) -> Sharding | None:
    shape, dtype = tuple(layout.shape), layout.tensor_meta.dtype
    found, beside = layout.placements
    names = layout.mesh.mesh_dim_names
    axis = names and _torch.sister_axis(mesh, layout.mesh[names[1]])
    if not axis or not _is_known(beside):
        return None
    joined = _torch.join_axes(mesh, axis)
    if joined != layout.mesh:
        return None
    whole = _torch.build_spec(axis, (beside,), shape, dtype)
    if not found.is_replicate() and found != _data_placement(whole, shape):
        return None
    layout = _torch.build_spec(joined, layout.placements, shape, dtype)
    rows = (shape or (0,))[0]
    is_even = rows % mesh.size() == 0
    if beside.is_shard(0):
        coordinate = joined.get_coordinate()
        assert coordinate is not None
        size = joined.size(1)
        is_even = rows % (mesh.size() * size) == 0
        rows = shard_size(rows, size, coordinate[1])
    return Sharding(layout, whole, mesh, rows, not found.is_replicate(), is_even)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def _data_placement(whole: Any, shape: tuple[int, ...]) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    if not shape or not prod(shape) or _leaves_a_rank_empty(whole, shape):
        return Replicate()
    if _shards_rows(whole) and whole.mesh.size() > 1:
        return _torch.strided_shard(0, whole.mesh.size())
    return Shard(0)


def _leaves_a_rank_empty(whole: Any, shape: tuple[int, ...]) -> bool:
    """Whether some rank of the other axis has nothing that could be gathered."""
    if whole is None or not whole.placements[0].is_shard():
        return False
    size = whole.mesh.size()
    return not shard_size(shape[whole.placements[0].dim], size, size - 1)


def _shards_rows(whole: Any) -> bool:
    return whole is not None and bool(whole.placements[0].is_shard(0))


def _is_known(placement: Any) -> bool:
    from torch.distributed.tensor import Replicate, Shard

    return type(placement) in (Replicate, Shard)


def find_layout_problem(layout: Any, axes: DataAxes) -> str:
    """Why a tensor with this layout cannot be sharded over the data axis; empty: it can."""
    what = f"is a DTensor {list(layout.placements)} on {layout.mesh}: "
    mesh = axes.shard
    if axes.replicas is not None:
        return what + (
            "with replicas of shards (a mesh of two axes), parameters are plain, or "
            f"[Replicate(), Shard(0)] on {axes.mesh}. Beside tensor parallel layouts, "
            "pass one data axis, mesh=mesh['dp']"
        )
    if layout.mesh.ndim != 1 or not _is_known(layout.placements[0]):
        return what + (
            "only Shard(dim) or Replicate() over one other axis can be sharded over the "
            "data axis besides. Use DataParallel('replicate') with such layouts"
        )
    if _torch.sister_axis(mesh, layout.mesh) is None:
        return what + (
            "its axis and the data axis are not two axes of one mesh. Make both from one, "
            "mesh = init_device_mesh(..., mesh_dim_names=('dp', 'tp')), lay the model out "
            "over mesh['tp'] and pass mesh=mesh['dp']"
        )
    rows, beside = (layout.shape or (0,))[0], layout.mesh.size()
    if _shards_rows(layout) and not can_describe(rows, mesh.size(), beside):
        return what + (
            f"{rows} rows over {beside} ranks, and each part again over {mesh.size()}, is "
            f"a layout that DTensor cannot describe. Pad it to a multiple of {beside} "
            "rows, or use DataParallel('replicate')"
        )
    return ""


def can_describe(rows: int, num_data: int, num_beside: int) -> bool:
    """Whether DTensor has a layout for rows sharded over two axes, the data axis last.

    It takes the rows of one data rank as a block and shardings that evenly over the other
    axis; this must give the parts that the ranks really have.

    >>> can_describe(9, 2, 2), can_describe(7, 3, 2)
    (True, False)
    """
    parts = [shard_size(rows, num_beside, rank) for rank in range(num_beside)]
    for data_rank in range(num_data):
        held = [shard_size(part, num_data, data_rank) for part in parts]
        block = sum(held)
        if held != [shard_size(block, num_beside, rank) for rank in range(num_beside)]:
            return False
    return True


def plan_shardings(inventory: Inventory, axes: DataAxes) -> dict[int, Sharding]:
    """How each parameter is sharded, or will be, over the data axis, by its slot."""
    problems = [
        *_module_problems(inventory, axes.shard),
        *_parameter_problems(inventory, axes),
    ]
    if not problems:
        shardings = {
            place: _sharding(slot.tensor, axes)
            for place, slot in enumerate(inventory.slots)
            if slot.role is Role.PARAMETER
        }
        problems = list(_state_problems(inventory, shardings))
    if problems:
        raise CaptureError(
            f"compile(parallel_mode=DataParallel('fully_shard')) on mesh {axes.mesh}:\n\n"
            + "\n".join(f"  * {line}" for line in problems)
            + "\n\nThe mode takes parameters of modules that are arguments of the step, "
            "plain or laid out over one other axis of the mesh, and shards them over the "
            "data axis by itself. Nothing was changed."
        )
    return shardings


def plan_layout(
    inventory: Inventory, shardings: dict[int, Sharding]
) -> Relayout | None:
    """Shards for all parameters of a step that are not shards yet; None: all are."""
    slots = list(inventory.slots)
    for place, sharding in _with_states(inventory, shardings):
        if _is_unsharded(sharding, slots[place].tensor):
            slots[place] = replace(slots[place], tensor=shard(slots[place], sharding))
    if all(old is new for old, new in zip(inventory.slots, slots, strict=True)):
        return None
    after = replace(inventory, slots=slots)
    beside = tuple(
        {sharding.whole.mesh: None for sharding in shardings.values() if sharding.whole}
    )
    return Relayout(after, _checksums(inventory.slots, slots), beside, inventory)


def _sharding(tensor: torch.Tensor, axes: DataAxes) -> Sharding:
    layout = _torch.layout_of(tensor)
    known = None if layout is None else read_sharding(layout, axes)
    return known or plan_sharding(layout, tuple(tensor.shape), tensor.dtype, axes)


def _with_states(
    inventory: Inventory, shardings: dict[int, Sharding]
) -> Iterator[tuple[int, Sharding]]:
    """Every parameter, and its gradient and the states that have its shape with it."""
    yield from shardings.items()
    for parameter, gradient in inventory.gradients.items():
        yield gradient, shardings[parameter]
    for state in inventory.states:
        tensor, sharding = (
            inventory.slots[state.slot].tensor,
            shardings[state.parameter],
        )
        if tensor.shape == sharding.layout.shape and not is_counter(state.key, tensor):
            yield state.slot, sharding


def _is_unsharded(sharding: Sharding, tensor: torch.Tensor) -> bool:
    """Whether a tensor has the layout of the gathered one, and is to be sharded."""
    return _has_layout(tensor, sharding.whole)


def _has_layout(tensor: torch.Tensor, layout: Any) -> bool:
    found = _torch.layout_of(tensor)
    if found is None or layout is None:
        return found is layout
    same_mesh = bool(found.mesh == layout.mesh)
    return same_mesh and bool(found.placements == layout.placements)


def shard(slot: Slot, sharding: Sharding) -> torch.Tensor:
    """This rank's rows of a tensor, as a DTensor; a tensor without rows is replicated."""
    whole = _torch.plain_tensor(slot.tensor).detach()
    local = whole[slice(*sharding.kept)] if sharding.is_sharded else whole
    local = local.clone(memory_format=torch.contiguous_format)
    mesh, placements = sharding.layout.mesh, sharding.layout.placements
    shape = tuple(slot.tensor.shape)
    spec = _torch.build_spec(mesh, placements, shape, whole.dtype)
    sharded = _torch.wrap_local(local, spec)
    if slot.role is not Role.PARAMETER:
        return sharded
    parameter = nn.Parameter(sharded, requires_grad=slot.tensor.requires_grad)
    copy_attributes(slot.tensor, parameter)
    note_predecessor(parameter, slot.tensor)
    return parameter


def empty_shard(slot: Slot, sharding: Sharding) -> torch.Tensor:
    """A tensor like a parameter's shard, without its values; a shard as it is."""
    if not _is_unsharded(sharding, slot.tensor):
        return slot.tensor
    whole = _torch.plain_tensor(slot.tensor)
    shape = list(whole.shape)
    if sharding.is_sharded:
        first, end = sharding.kept
        shape[0] = end - first
    return _torch.wrap_local(whole.new_empty(shape), sharding.layout)


def _checksums(before: list[Slot], after: list[Slot]) -> tuple[Checksum, ...]:
    """A checksum of each new shard's tensor: ranks with other values would mix them."""
    sharded = [old for old, new in zip(before, after, strict=True) if old is not new]
    return tuple(
        Checksum(text, _torch.layout_of(slot.tensor))
        for slot, text in zip(sharded, checksums(sharded), strict=True)
    )


def _module_problems(inventory: Inventory, mesh: DeviceMesh) -> Iterator[str]:
    # Not at the top: importing it registers operators.
    from torch.distributed.fsdp import FSDPModule

    for path, child in inventory.named_modules():
        if isinstance(child, (FSDPModule, DistributedDataParallel)):
            yield (
                f"{path} is wrapped already ({type(child).__name__}) and would "
                "gather and reduce a second time: build the model without "
                "fully_shard() and DistributedDataParallel"
            )
        if _computes_on_shards(child, mesh):
            yield (
                f"{path} has a style that computes on shards over this very axis, "
                "which the mode would gather: pass the data axis, mesh=mesh['dp']"
            )


def _computes_on_shards(module: nn.Module, mesh: DeviceMesh) -> bool:
    # By its name: the step does not import the styles.
    if not type(module).__module__.startswith("torchspmd.parallel."):
        return False
    layouts = map(_torch.layout_of, module.parameters(recurse=False))
    return any(layout and is_over(layout, mesh) for layout in layouts)


def _parameter_problems(inventory: Inventory, axes: DataAxes) -> Iterator[str]:
    in_modules = {place.slot for place in inventory.places}
    for place, slot in enumerate(inventory.slots):
        if slot.role is Role.PARAMETER:
            problem = _problem(slot, axes)
            if place not in in_modules:
                problem = (
                    "is in no module that the step takes: pass the module that holds it, "
                    "so that its shard can be put there"
                )
            if problem:
                yield f"{slot.name} {problem}"


def _problem(slot: Slot, axes: DataAxes) -> str:
    tensor, mesh = slot.tensor, axes.shard
    layout = _torch.layout_of(tensor)
    if layout is not None:
        if read_sharding(layout, axes) is not None:
            return ""
        problem = find_layout_problem(layout, axes)
        if problem:
            return problem
    elif type(tensor) not in (nn.Parameter, torch.Tensor) and not _torch.is_rehearsed(
        tensor
    ):
        return f"is a {type(tensor).__name__}, and shards would lose this type"
    if tensor.is_meta:
        return "is on the meta device: give it values first (module.to_empty())"
    if tensor.device.type != mesh.device_type:
        return f"is on {tensor.device}, the mesh is on {mesh.device_type}"
    for _, _, hook in _torch.hooks_of(tensor, _torch.GRADIENT_HOOK_TABLES):
        # A gathered parameter gives its gradient the layout by itself.
        if not isinstance(hook, _torch.LaysOutGradient):
            return (
                f"has a gradient hook ({name_of_hook(hook)}), which its shard would not "
                "have: do that in the step, after backward"
            )
    return ""


def _state_problems(
    inventory: Inventory, shardings: dict[int, Sharding]
) -> Iterator[str]:
    for place, sharding in _with_states(inventory, shardings):
        slot = inventory.slots[place]
        if not _is_unsharded(sharding, slot.tensor) and not _has_layout(
            slot.tensor, sharding.layout
        ):
            layout = _torch.layout_of(slot.tensor)
            found = "plain" if layout is None else f"{list(layout.placements)}"
            wanted = sharding.whole or sharding.layout
            yield (
                f"{slot.name} is {found}, its parameter {list(wanted.placements)} on "
                f"{wanted.mesh}: clear it before the first step (zero_grad(), a new "
                "optimizer), or lay it out as its parameter"
            )
