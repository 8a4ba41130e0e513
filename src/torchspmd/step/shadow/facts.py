"""What a program says about the comparison of its calls: what is late, what is rounding."""

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.layout.rounding import Tolerance, choose_tolerance
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.outputs import NewGradient, NewNumber, NewValue
from torchspmd.step.capture.spread import Spread
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.graph.metadata import output_values
from torchspmd.step.modes.global_batch import GlobalBatch
from torchspmd.step.program import Program
from torchspmd.step.shadow.compare import OwnRows
from torchspmd.step.shadow.eager import Late

# Times the tolerance of check_parity, which is for one step of a whole model.
_INEXACT = 64.0  # sums are taken in another order
_SAME_KERNELS = 4.0
_LOW_PRECISION = 1e-4


def find_late(program: Program) -> Late:
    """What a program leaves for the next call, by where it goes."""
    run = program.run
    if not isinstance(run, IterGraphModule) or not run.is_deferring:
        return Late()
    names = {name for region in run.graph.regions for name in region.nodes}
    slots, gradients, numbers = set(), set(), set()
    values = output_values(run.graph)
    for value, where in zip(values, program.outputs.destinations, strict=True):
        if not isinstance(value, fx.Node) or value.name not in names:
            continue
        match where:
            case NewValue(slot):
                slots.add(slot)
            case NewGradient(parameter):
                gradients.add(parameter)
            case NewNumber(number):
                numbers.add(number)
    return Late(frozenset(slots), frozenset(gradients), frozenset(numbers))


def draws(graph: fx.GraphModule) -> bool:
    """Whether a graph draws random numbers."""
    return any(
        node.op == "call_function"
        and _torch.draws_random_numbers(node.target, node.args, node.kwargs)
        for node in graph.graph.nodes
    )


def own_rows(spread: Spread) -> OwnRows:
    """Which part of a value of the global batch this rank has."""
    if not isinstance(spread, GlobalBatch):
        return OwnRows()
    return OwnRows(spread.mesh.get_local_rank(), spread.mesh.size())


def tolerance_of(
    program: Program, inventory: Inventory, spread: Spread, backend: str
) -> Tolerance:
    """What counts as rounding: little where the graph does eager's own operations."""
    dtypes = [slot.tensor.dtype for slot in inventory.slots]
    for node in program.graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            dtypes.append(value.dtype)
    floating = [each for each in dtypes if each.is_floating_point]
    coarsest = max(floating, key=lambda d: torch.finfo(d).eps, default=torch.float32)
    size = 1 if spread.mesh is None else spread.mesh.size()
    has_same_kernels = backend != "inductor" and not isinstance(spread, GlobalBatch)
    is_on_cpu = all(slot.tensor.device.type == "cpu" for slot in inventory.slots)
    if has_same_kernels and is_on_cpu and size == 1:
        return choose_tolerance(coarsest, 1)
    wide = choose_tolerance(coarsest, sum(1 for _ in inventory.named_modules()))
    if torch.finfo(coarsest).eps > _LOW_PRECISION:
        return wide
    # Kernels of a GPU may add in another order in each run.
    factor = _SAME_KERNELS if has_same_kernels and size == 1 else _INEXACT
    return Tolerance(min(factor * wide.relative, 0.3), wide.reason)
