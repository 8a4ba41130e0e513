"""Sharded parameters while a step is traced: whole where they are used, shards elsewhere.

Inside of a module's forward an attribute such as ``self.weight`` is the gathered tensor.
Everywhere else (``model.parameters()``, gradients, clipping) it is the shard, a DTensor,
and a function of torch that needs its values with gradients gets them gathered.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import (
    Callable,
    ItemsView,
    Iterator,
    Mapping,
    MutableMapping,
    ValuesView,
)
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from torch import fx
from torch.autograd.function import once_differentiable
from torch.optim.swa_utils import AveragedModel

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.errors import CaptureError
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.substitute import pass_for
from torchspmd.step.capture.trace_modes import FunctionMode, replaced
from torchspmd.step.capture.user_code import calling_line
from torchspmd.step.graph.aliases import find_aliases, written_nodes
from torchspmd.step.graph.metadata import OwnerLog, last_node, owner_of
from torchspmd.step.modes.precision import Precision, divisors
from torchspmd.step.modes.shard_layout import Sharding

# ----------------------------------------------------------------------------
# Shards to whole tensors and back, as plain collectives of a graph.
#
# Rows that do not divide by the number of ranks are padded at the end, the same way on
# every rank, so that the graphs of all ranks have the same nodes.


def gather_rows(
    local: torch.Tensor, sharding: Sharding, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The whole tensor from this rank's rows of it, sent in a dtype of its own or not."""
    # Gloo sends real numbers only. A policy of precision is for real numbers, too: cast to
    # one of its types, a complex parameter would lose its imaginary part.
    if local.is_complex():
        return torch.view_as_complex(gather_rows(torch.view_as_real(local), sharding))
    dtype = dtype or local.dtype
    if not sharding.is_sharded:  # small, and a write must not reach the parameter
        return local.to(dtype, copy=True)
    shard = local
    if not sharding.is_even:
        shard = _pad_rows(local, sharding.share - local.shape[0])
    shard = shard.to(dtype)  # last: a bucket is cast as one
    whole = _torch.gather_now(shard, *_group(sharding))
    return whole if sharding.is_even else whole.narrow(0, 0, sharding.rows)


def reduce_rows(
    gradient: torch.Tensor,
    sharding: Sharding,
    *,
    average: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum, or average, of all ranks' gradients.

    They are reduced in the dtype that they have, and returned in the one that is given.
    """
    if gradient.is_complex():
        real = torch.view_as_real(gradient.resolve_conj())
        return torch.view_as_complex(reduce_rows(real, sharding, average=average))
    before, after = 1.0, 1.0
    if average:  # gloo has no average: the sum is scaled everywhere
        before, after = divisors(gradient.dtype, sharding.num_batches)
    whole = gradient if before == 1.0 else gradient / before
    if not sharding.is_sharded:
        total = _torch.sum_over(whole, sharding.mesh.get_group())
    else:
        whole = whole.contiguous()
        if not sharding.is_even:
            padded = sharding.mesh.size() * sharding.share
            whole = _pad_rows(whole, padded - sharding.rows)
        total = _torch.wait(_torch.start_reduce_scatter(whole, *_group(sharding)))
    if sharding.replicas is not None:
        total = _torch.sum_over(total, sharding.replicas.get_group())
    if sharding.is_sharded and not sharding.is_even:
        first, last = sharding.kept
        total = total.narrow(0, 0, last - first)
    total = total if after == 1.0 else total / after
    return total.to(dtype or total.dtype)


def _pad_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, count])


def _group(sharding: Sharding) -> tuple[int, str]:
    return sharding.mesh.size(), sharding.mesh.get_group().group_name


GATHERED = "torchspmd_gathered"
_REDUCED = "torchspmd_reduced"


@dataclass(frozen=True, slots=True)
class _Kept:
    """A gathered value that may be used again."""

    whole: torch.Tensor
    version: int  # of the shard that it was gathered from
    call: int  # the outermost module call that it belongs to


class Gathering:
    """Gathers each parameter of a step where it is used, and reduces its gradient.

    A value that gradients flow through is gathered once between two backwards, so that
    its gradient is reduced once; others once in a call of a module.
    """

    def __init__(
        self,
        inventory: Inventory,
        shown: list[torch.Tensor],
        log: OwnerLog,
        shardings: Mapping[int, Sharding],
        *,
        average: bool,
        precision: Precision,
    ) -> None:
        self.log, self.average, self.precision = log, average, precision
        self._names = {
            id(shown[place]): inventory.slots[place].name for place in shardings
        }
        self._shardings = {
            id(shown[place]): sharding for place, sharding in shardings.items()
        }
        self._kept: dict[tuple[int, torch.dtype], _Kept] = {}
        self._gathered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scattered: Counter[int] = Counter()  # gradients under way to a shard

    def watch(self, shown: list[torch.Tensor]) -> Iterator[Any]:
        """Check the gradients of all parameters; gives the hooks, to be removed."""
        for tensor in shown:
            if self.owns(tensor) and tensor.requires_grad:
                yield tensor.register_hook(functools.partial(self.arrive, tensor))

    def owns(self, value: object) -> bool:
        """Whether a value is one of the sharded parameters."""
        return id(value) in self._names

    @property
    def is_in_forward(self) -> bool:
        """Whether the forward of a module runs now."""
        return self.log.is_in_module

    def owner_of(self, parameter: torch.Tensor) -> str:
        """The module that a parameter belongs to."""
        return self._names[id(parameter)].rpartition(".")[0]

    def sharding_of(self, parameter: torch.Tensor) -> Sharding:
        """How a parameter is sharded over the data axis."""
        return self._shardings[id(parameter)]

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """The gathered parameter; gathers it unless that was done already.

        Only a forward computes in the precision that was asked for.
        """
        dtype = parameter.dtype
        if self.log.is_in_module:
            dtype = self.precision.of_whole(dtype)
        version = _torch.version_of(_torch.plain_tensor(parameter))
        needs_gradient = parameter.requires_grad and torch.is_grad_enabled()
        kept = self._kept.get((id(parameter), dtype))
        if kept is not None and kept.version == version:
            if kept.whole.requires_grad or (
                not needs_gradient and kept.call == self.log.calls
            ):
                return kept.whole
        phase = self.log.current().phase
        with self.log.owned(phase, self.owner_of(parameter)):
            made: torch.Tensor = _Gather.apply(parameter, self, dtype)
            node = last_node(_torch.current_graph())
            if node is not None:
                node.meta[GATHERED] = self._names[id(parameter)]
        pass_for(made, parameter)
        self._kept[id(parameter), dtype] = _Kept(made, version, self.log.calls)
        self._gathered[id(made)] = (made, parameter)
        return made

    def shard_of(self, value: Any) -> Any:
        """The parameter that a gathered value was made from; other values as they are."""
        return self._gathered.get(id(value), (None, value))[1]

    def scatter(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The reduced gradient of a shard; the gathered value is not used again."""
        sharding = self.sharding_of(parameter)
        self._kept.pop((id(parameter), gradient.dtype), None)
        with self.log.owned(Phase.BACKWARD, self.owner_of(parameter)):
            whole = _laid_out(gradient, sharding.whole)
            whole = whole.to(self.precision.of_reduction(whole.dtype))
            rows = reduce_rows(
                whole, sharding, average=self.average, dtype=parameter.dtype
            )
            reduced = _torch.wrap_local(rows, sharding.layout)
        # A mark, not a list: autograd would copy a gradient that someone else holds.
        vars(reduced)[_REDUCED] = True
        self._scattered[id(parameter)] += 1
        return reduced

    def arrive(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Refuse a gradient that did not come through a gathered parameter."""
        count = self._scattered.pop(id(parameter), 0)
        if torch.is_grad_enabled():
            raise CaptureError(
                f"compile: the gradient of {self._names[id(parameter)]} is taken with "
                "create_graph=True, and one that was reduced into shards cannot be "
                f"differentiated again\n\n  * {calling_line()}\n\nUse parallel_mode="
                "DataParallel('replicate') for a gradient penalty, or leave create_graph "
                "out."
            )
        if count == 0 or (count == 1 and _REDUCED not in vars(gradient)):
            raise CaptureError(
                f"compile: a gradient reaches {self._names[id(parameter)]} without being "
                "reduced: an autograd.Function got the shard, outside of a module's "
                "forward. Call it inside of one, where parameters are whole."
            )


def _laid_out(gradient: torch.Tensor, layout: Any) -> torch.Tensor:
    """This rank's part of a gradient in the layout of the gathered parameter."""
    found = _torch.layout_of(gradient)
    if found is not None and found.placements != layout.placements:
        moved: Any = gradient  # a sum over the other axis that is still to be taken
        gradient = moved.redistribute(placements=layout.placements)
    return _torch.finished(_torch.plain_tensor(gradient))


class _Gather(torch.autograd.Function):
    """A shard in, the whole tensor out, plain or over its other axis; and back, reduced."""

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, gathering: Gathering, dtype: torch.dtype
    ) -> Any:
        ctx.parameter, ctx.gathering = parameter, gathering
        sharding = gathering.sharding_of(parameter)
        whole = gather_rows(_torch.plain_tensor(parameter), sharding, dtype)
        layout = sharding.whole
        if layout is None:
            return whole
        if dtype is not parameter.dtype:
            shape = tuple(layout.shape)
            layout = _torch.build_spec(layout.mesh, layout.placements, shape, dtype)
        return _torch.wrap_local(whole, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if gradient.layout is not torch.strided:
            raise CaptureError(
                f"compile: {ctx.gathering.owner_of(ctx.parameter)} makes a sparse "
                "gradient, which cannot be scattered. Make the module with sparse=False."
            )
        return ctx.gathering.scatter(ctx.parameter, gradient), None, None


class Wholes(Protocol):
    """What a forward sees for parameters that are kept in another form."""

    @property
    def is_in_forward(self) -> bool:
        """Whether the forward of a module runs now."""
        ...

    def owns(self, value: object) -> bool:
        """Whether a value is one of these parameters."""
        ...

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """What a forward sees for a parameter."""
        ...

    def shard_of(self, value: Any) -> Any:
        """The parameter that a forward saw as this value; other values as they are."""
        ...


@final
class GatheringTable(MutableMapping[str, Any]):
    """A module's table of parameters: attributes read in a forward are gathered."""

    def __init__(self, table: MutableMapping[str, Any], gathering: Wholes) -> None:
        self._table, self._gathering = table, gathering

    def __getitem__(self, key: str) -> Any:
        value = self._table[key]
        if self._gathering.owns(value) and self._gathering.is_in_forward:
            return self._gathering.whole(value)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        # What was read here may be put back: functional_call swaps parameters so.
        self._table[key] = self._gathering.shard_of(value)

    def __delitem__(self, key: str) -> None:
        del self._table[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, key: object) -> bool:
        return key in self._table

    def items(self) -> Any:
        """What ``named_parameters()`` reads: the shards, inside of a forward the wholes."""
        return ItemsView(self) if self._gathering.is_in_forward else self._table.items()

    def values(self) -> Any:
        """The same without names."""
        is_in_forward = self._gathering.is_in_forward
        return ValuesView(self) if is_in_forward else self._table.values()


# What a sharded parameter answers by itself: facts, hooks, and DTensor's own methods.
_OF_THE_SHARD = frozenset(
    {
        "backward",
        "data_ptr",
        "dim",
        "element_size",
        "get_device",
        "grad",  # torch.autograd.grad, with respect to the shard
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "ndimension",
        "nelement",
        "numel",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "size",
        "stride",
        "storage_offset",
        "__format__",
        "__hash__",
        "__len__",
        "__repr__",
    }
)
_VIEW_PROPERTIES = frozenset({"T", "H", "mT", "mH", "real", "imag"})


@final
class GatherForFunctions(FunctionMode):
    """Gathers sharded parameters that reach a function of torch outside of a forward."""

    def __init__(self, gathering: Wholes) -> None:
        super().__init__()
        self._gathering = gathering

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function, on gathered parameters where it needs their values."""
        leaves, structure = _torch.flatten_tree((args, kwargs))
        if any(map(self._gathering.owns, leaves)) and self._needs_values(func, leaves):
            whole = [
                self._gathering.whole(leaf) if self._gathering.owns(leaf) else leaf
                for leaf in leaves
            ]
            args, kwargs = _torch.unflatten_tree(whole, structure)
        return func(*args, **kwargs)

    def _needs_values(self, func: Callable[..., Any], leaves: list[Any]) -> bool:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            descriptor = getattr(func, "__self__", None)
            return getattr(descriptor, "__name__", "") in _VIEW_PROPERTIES
        if name in _OF_THE_SHARD or _writes(name):
            return False
        # Without gradients, shards work with shards (a moving average of weights).
        return torch.is_grad_enabled() or any(
            isinstance(leaf, torch.Tensor)
            and leaf.ndim > 0
            and _torch.layout_of(leaf) is None
            for leaf in leaves
        )


# Torch sees ``+=`` as ``add_``, but these operators by their own names. Not all that start
# with ``__i``: ``__invert__`` and ``__int__`` only read.
_IN_PLACE = frozenset(
    {*("__iand__", "__ilshift__", "__ior__", "__irshift__", "__ixor__"), "__setitem__"}
)


def _writes(name: str) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in _IN_PLACE


@contextlib.contextmanager
def forwards_see(wholes: Wholes, inventory: Inventory) -> Iterator[None]:
    """Inside, modules compute with what they are to see for their parameters."""
    with contextlib.ExitStack() as stack:
        for module in (
            each for _, root in inventory.modules for each in root.modules()
        ):
            table = module._parameters
            if any(map(wholes.owns, table.values())):
                stack.callback(vars(module).__setitem__, "_parameters", table)
                vars(module)["_parameters"] = GatheringTable(table, wholes)
        # It detaches all parameters itself; without gradients they stay shards.
        average = torch.no_grad()(AveragedModel.update_parameters)
        stack.enter_context(replaced((AveragedModel, "update_parameters", average)))
        stack.enter_context(GatherForFunctions(wholes))
        yield


def check_writes(traced: fx.GraphModule) -> None:
    """Refuse a step that writes into a gathered parameter: the shard would not change."""
    aliases = find_aliases(traced.graph)
    names = {
        aliases.root[node]: node.meta[GATHERED]
        for node in traced.graph.nodes
        if GATHERED in node.meta
    }
    for node in traced.graph.nodes:
        for written in written_nodes(node):
            root = aliases.root[written]
            if root in names:
                raise CaptureError(
                    f"compile: {owner_of(node).module} writes into {names[root]} "
                    "inside of forward, or with gradients enabled, where it is a "
                    "gathered copy that is thrown away. Write to it in the step "
                    "itself, under torch.no_grad(), where it is the shard."
                )
