"""Each rank keeps a share of every parameter, and gathers the whole where it is used."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, final

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.micro_batches import join_scatters
from torchspmd.step.capture.parallel_mode import ParallelMode, Relayout
from torchspmd.step.graph.metadata import OwnerLog
from torchspmd.step.modes.gather import (
    GatherForFunctions,
    Gathering,
    check_writes,
    drop_unused_gathers,
    gather_again_in_backward,
    gather_once,
    gathering_tables,
)
from torchspmd.step.modes.shard_layout import (
    Sharding,
    empty_shard,
    plan_layout,
    plan_shardings,
)


@final
class FullySharded(ParallelMode):
    """Parameters and optimizer state are shards; each rank computes on its own batch."""

    has_own_batches = True

    def __init__(
        self,
        mesh: DeviceMesh,
        reduce: Literal["avg", "sum"],
        *,
        reshard_after_forward: bool,
        sync_each_backward: bool,
    ) -> None:
        self.mesh: DeviceMesh = mesh
        self.averages = reduce == "avg"
        self._reshard = reshard_after_forward
        self._sync_each_backward = sync_each_backward
        # Of the step that is captured, by slot. Meshes cannot be asked while it is traced.
        self._shardings: dict[int, Sharding] = {}

    def lay_out(self, inventory: Inventory) -> Relayout | None:
        """Shards for the parameters that are none yet."""
        self._shardings = plan_shardings(inventory, self.mesh)
        return plan_layout(inventory, self._shardings)

    def stand_in(self, inventory: Inventory) -> Callable[[int], torch.Tensor]:
        """Shards without values: whole states would take the memory of whole models."""
        shardings = plan_shardings(inventory, self.mesh)
        return lambda slot: empty_shard(inventory.slots[slot], shardings[slot])

    @contextlib.contextmanager
    def installed(
        self, inventory: Inventory, shown: list[torch.Tensor], log: OwnerLog
    ) -> Iterator[None]:
        """Gather parameters where the step uses them."""
        gathering = Gathering(
            inventory, shown, log, self._shardings, average=self.averages
        )
        with contextlib.ExitStack() as stack:
            for module, table in gathering_tables(inventory, gathering):
                stack.callback(
                    vars(module).__setitem__, "_parameters", module._parameters
                )
                vars(module)["_parameters"] = table
            for hook in gathering.watch(shown):
                stack.callback(hook.remove)
            stack.enter_context(GatherForFunctions(gathering))
            yield

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
        group = self.mesh.get_group().group_name
        drop_unused_gathers(graph.graph)
        if self._reshard:
            gather_again_in_backward(graph.graph, group)
        if self._sync_each_backward:
            return 0
        if not self._reshard:
            gather_once(graph.graph, group)
        return join_scatters(graph.graph, group)
