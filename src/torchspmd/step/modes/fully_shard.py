"""Each rank keeps a share of every parameter, and gathers the whole where it is used."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, final

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.step.capture.inventory import Inventory, Role
from torchspmd.step.capture.micro_batches import join_scatters
from torchspmd.step.capture.parallel_mode import ParallelMode, Relayout
from torchspmd.step.graph.metadata import OwnerLog
from torchspmd.step.modes.gather import Gathering, check_writes, forwards_see
from torchspmd.step.modes.gather_lifetime import (
    drop_unused_gathers,
    gather_again_in_backward,
    gather_once,
)
from torchspmd.step.modes.precision import Casting, Precision, divisors
from torchspmd.step.modes.shard_layout import (
    DataAxes,
    Sharding,
    empty_shard,
    plan_layout,
    plan_shardings,
    read_sharding,
)
from torchspmd.step.modes.whole_draws import WholeDraws


@final
class FullySharded(ParallelMode):
    """Parameters and optimizer state are shards; each rank computes on its own batch."""

    has_own_batches = True

    def __init__(
        self,
        axes: DataAxes,
        reduce: Literal["avg", "sum"],
        *,
        reshard_after_forward: bool,
        sync_each_backward: bool,
        precision: Precision,
    ) -> None:
        self.axes = axes
        # All ranks that have a batch of their own; they compile the step together.
        self.mesh: DeviceMesh = _torch.flatten_mesh(axes.mesh)
        self.averages = reduce == "avg"
        self._reshard = reshard_after_forward
        self._sync_each_backward = sync_each_backward
        self.precision = precision
        # Of the step that is captured, by slot. Meshes cannot be asked while it is traced.
        self._shardings: dict[int, Sharding] = {}

    @property
    def sharded_over(self) -> tuple[DeviceMesh, ...]:
        """The axes that this mode itself shards tensors over."""
        return (self.mesh, self.axes.shard)

    def lay_out(self, inventory: Inventory) -> Relayout | None:
        """Shards for the parameters that are none yet."""
        self._shardings = plan_shardings(inventory, self.axes)
        _torch.share_memory_of_shards()
        return plan_layout(inventory, self._shardings)

    def stand_in(self, inventory: Inventory) -> Callable[[int], torch.Tensor]:
        """Shards without values: whole states would take the memory of whole models."""
        shardings = plan_shardings(inventory, self.axes)
        return lambda slot: empty_shard(inventory.slots[slot], shardings[slot])

    def tracing(self) -> contextlib.AbstractContextManager[Any]:
        """Random numbers for shards are those of the whole parameter."""
        return WholeDraws(self._shardings.values())

    @contextlib.contextmanager
    def installed(
        self, inventory: Inventory, shown: list[torch.Tensor], log: OwnerLog
    ) -> Iterator[None]:
        """Gather parameters where the step uses them."""
        gathering = Gathering(
            inventory,
            shown,
            log,
            self._shardings,
            average=self.averages,
            precision=self.precision,
        )
        models = [module for _, module in inventory.modules]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.precision.installed(models))
            for hook in gathering.watch(shown):
                stack.callback(hook.remove)
            stack.enter_context(forwards_see(gathering, inventory))
            yield

    @contextlib.contextmanager
    def installed_eagerly(
        self, inventory: Inventory, wholes: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """The same meaning for an eager call on whole parameters: casts alone."""
        if self.precision == Precision():
            yield
            return
        parameters = [
            whole
            for whole, slot in zip(wholes, inventory.slots, strict=True)
            if slot.role is Role.PARAMETER
        ]
        casting = Casting(parameters, self.precision)
        models = [module for _, module in inventory.modules]
        with (
            casting.following(),
            self.precision.installed(models),
            forwards_see(casting, inventory),
        ):
            yield

    def part_of(self, tensor: torch.Tensor) -> str:
        """Which rows of a tensor this rank holds; empty for all of them."""
        layout = _torch.layout_of(tensor)
        sharding = None if layout is None else read_sharding(layout, self.axes)
        if sharding is None or not sharding.is_sharded:
            return ""
        first, end = sharding.kept
        return f"[{first}:{end}]"

    def reduce_whole(self, gradient: torch.Tensor) -> torch.Tensor:
        """A whole gradient of such a call, reduced as those of shards are."""
        dtype = self.precision.of_reduction(self.precision.of_whole(gradient.dtype))
        before, after = 1.0, 1.0
        if self.averages:
            before, after = divisors(dtype, self.mesh.size())
        layout = _torch.layout_of(gradient)
        sent = _torch.plain_tensor(gradient).to(dtype)
        total = _torch.sum_over(sent / before, self.mesh.get_group()) / after
        total = total.to(gradient.dtype)
        return total if layout is None else _torch.wrap_local(total, layout)

    def result(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's own value; of a shard, the whole."""
        if _torch.layout_of(value) is None:
            return value
        laid_out: Any = value
        return _torch.finished(laid_out.full_tensor())

    def check(self, traced: fx.GraphModule) -> None:
        """Refuse what gathering on use would get wrong."""
        check_writes(traced)

    def finish(self, graph: fx.GraphModule) -> int:
        """Gather again in backward, reduce micro-batches once, where that was asked for."""
        group = self.axes.shard.get_group().group_name
        drop_unused_gathers(graph.graph)
        if self._reshard:
            gather_again_in_backward(graph.graph, group)
        if self._sync_each_backward:
            return 0
        if not self._reshard:
            gather_once(graph.graph, group)
        return join_scatters(graph.graph, group)
