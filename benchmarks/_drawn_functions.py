"""Drawn functions for ``local_map``, each against one device.

Bodies with any layouts, and chains of steps whose layouts are right. A chain starts with
this rank's part of ``x`` and keeps track of what its value is: rows of a whole (``S``), the
whole on each rank (``R``) or a term of a sum (``P``). Only steps that are right there are
drawn, with collectives among them and rows that ranks cannot share evenly: the function
must give what one device gives, forwards and backwards, or be refused by an error of
torchspmd. Some chains declare too much, with a check: those must be refused.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from _drawn_plans import Outcome, P, R, compare, outcome_of, run_plan, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Shard,
    distribute_tensor,
)
from torch.utils.checkpoint import checkpoint

from torchspmd import local_map

# ----------------------------------------------------------------------------
# Mapped functions: a body on this rank's rows, and how its result is put together.


def _sum_rows(x: Any, w: Any) -> Any:
    return (x * w).sum(0)


def _gathered(group: Any, t: Any) -> Any:
    gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    return gather(t, 0, group)


def _in_place(t: Any) -> Any:
    dist.all_reduce(t)
    return t


def _listed(t: Any) -> Any:
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t)
    return torch.cat(parts)


def _passed_on(t: Any) -> Any:
    got, size = torch.empty_like(t), dist.get_world_size()
    rank = dist.get_rank()
    works = [
        dist.P2POp(dist.isend, t, (rank + 1) % size),
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    return got


def _scattered(group: Any, t: Any) -> Any:
    scatter = (
        getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    )
    return scatter(t.contiguous(), "sum", 0, group)


# Each: the body on local rows, and the same on one device; x is (rows, 4), w is (4,).
BODIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rows": (lambda g, x, w: x * w, lambda n, x, w: x * w),
    "sum": (lambda g, x, w: _sum_rows(x, w), lambda n, x, w: _sum_rows(x, w)),
    "reduced": (
        lambda g, x, w: funcol.all_reduce(_sum_rows(x, w), "sum", g),
        lambda n, x, w: _sum_rows(x, w),
    ),
    "reduced in place": (
        lambda g, x, w: _in_place(_sum_rows(x, w)),
        lambda n, x, w: _sum_rows(x, w),
    ),
    "gathered": (lambda g, x, w: _gathered(g, x * w), lambda n, x, w: x * w),
    "gathered by list": (lambda g, x, w: _listed(x * w), lambda n, x, w: x * w),
    "mixed": (
        lambda g, x, w: x * funcol.all_reduce(_sum_rows(x, w), "sum", g),
        lambda n, x, w: x * _sum_rows(x, w),
    ),
    "mixed by list": (
        lambda g, x, w: x * _listed(x * w).sum(0),
        lambda n, x, w: x * _sum_rows(x, w),
    ),
    "passed on": (
        lambda g, x, w: x * _passed_on(x * w),
        lambda n, x, w: x * (x * w).roll(len(x) // n, 0),
    ),
    "broadcast": (
        lambda g, x, w: x * funcol.broadcast(w * 1.0, 0, g),
        lambda n, x, w: x * w,
    ),
    "scattered": (
        lambda g, x, w: _scattered(g, _gathered(g, x * w)),
        lambda n, x, w: n * x * w,
    ),
    "detached": (
        lambda g, x, w: x * w * _listed((x * w).detach()).sum(0),
        lambda n, x, w: x * w * _sum_rows(x, w).detach(),
    ),
}


def run_mapped(seed: int) -> Outcome:
    """One drawn function with drawn layouts, values and gradients."""
    rng = random.Random(seed)
    size = dist.get_world_size()
    name = rng.choice(list(BODIES))
    body, reference = BODIES[name]
    given, written = rng.choice((Shard(0), R, P)), rng.choice((Shard(0), R, P))
    weight = rng.choice((R, R, P))
    is_checked, needs = rng.random() < 0.5, rng.choice(((1, 1), (1, 0), (0, 1)))
    torch.manual_seed(seed)
    x, w = torch.randn(6 * size, 4).double(), torch.randn(4).double()
    case = (
        f"map {seed} on {size} ranks: {name}, x {given}, w {weight}, out {written}, "
        f"check={is_checked}, gradients {needs}"
    )

    def run() -> str:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        group = mesh.get_group(0)
        mapped = local_map(
            lambda x, w: body(group, x, w),
            [written],
            ([given], [weight]),
            check=is_checked,
        )
        tensors = [_distributed(t, mesh, p) for t, p in ((x, given), (w, weight))]
        for tensor, need in zip(tensors, needs, strict=True):
            tensor.requires_grad_(bool(need))
        y = mapped(*tensors)
        if not y.requires_grad:
            return ""
        y.redistribute(placements=[R]).square().sum().backward()
        alone = [
            t.clone().requires_grad_(bool(n))
            for t, n in zip((x, w), needs, strict=True)
        ]
        expected = reference(size, *alone)
        expected.square().sum().backward()
        values = [whole(y.detach())]
        if compare(values, [expected.detach()]):
            # Values are what the user declares; only replicas can be compared.
            is_wrong = is_checked and written == R and given == Shard(0)
            is_wrong &= name in ("rows", "sum")
            return "other values, which the check did not see" if is_wrong else ""
        if P in (given, weight) and not is_checked:
            return ""  # not linear in partial values: only a check sees it
        grads = [t.grad.full_tensor() for t in tensors if t.grad is not None]
        wanted = [t.grad for t in alone if t.grad is not None]
        if len(grads) != len(wanted):
            return "a gradient is missing"
        return compare(grads, wanted)

    return outcome_of(case, run)


def _distributed(value: torch.Tensor, mesh: Any, layout: Placement) -> DTensor:
    if isinstance(layout, Partial):
        mine = value if mesh.get_local_rank() == 0 else torch.zeros_like(value)
        return DTensor.from_local(mine, mesh, [layout], run_check=False)
    return distribute_tensor(value, mesh, [layout], src_data_rank=None)


# ----------------------------------------------------------------------------
# Chains.

COLUMNS = 3
LAYOUTS = {"S": Shard(0), "R": R, "P": P}


@dataclass(frozen=True)
class Operands:
    """What each step may read beside the value: all local, or all of one device."""

    x: Any
    scale: Any
    matrix: Any
    group: Any = None


@dataclass(frozen=True)
class Step:
    """One step of a chain.

    Attributes:
        moves: What a value is before and after it: ``SR`` gathers. A small letter is one
            row instead of many.
        local: What a rank does.
        alone: What one device does; None where it is the same.
        is_even: Whether it needs the same number of rows on each rank.
    """

    moves: tuple[str, ...]
    local: Callable[[Any, Operands], Any]
    alone: Callable[[Any, Operands], Any] | None = None
    is_even: bool = False


_SAME = ("SS", "RR", "PP", "rr", "pp")
_NOT_SUMS = ("SS", "RR", "rr")


def _my_rows(v: Any, o: Operands) -> Any:
    parts = list(v.chunk(dist.get_world_size(o.group)))
    rank = dist.get_rank(o.group)
    return parts[rank] if rank < len(parts) else v[:0]


def _written(v: Any, o: Operands) -> Any:
    copied = v.clone()
    copied[..., 0].mul_(2.0)
    return copied


def _passes(v: Any, o: Operands) -> Any:
    return v


STEPS = {
    "tanh": Step(_NOT_SUMS, lambda v, o: v.tanh()),
    "recomputed": Step(
        _NOT_SUMS, lambda v, o: checkpoint(torch.sin, v, use_reentrant=False)
    ),
    "detached": Step(_NOT_SUMS, lambda v, o: v * v.detach()),
    "scaled": Step(_SAME, lambda v, o: v * o.scale),
    "multiplied": Step(_SAME, lambda v, o: v @ o.matrix),
    "written": Step(_SAME, _written),
    "summed": Step(("Sp", "Rr", "Pp"), lambda v, o: v.sum(0, keepdim=True)),
    "reduced": Step(
        ("PR", "pr"), lambda v, o: funcol.all_reduce(v, "sum", o.group), _passes
    ),
    "gathered": Step(
        ("SR",), lambda v, o: _gathered(o.group, v.contiguous()), _passes, is_even=True
    ),
    "scattered": Step(
        ("PS",), lambda v, o: _scattered(o.group, v), _passes, is_even=True
    ),
    "mine": Step(("RS",), _my_rows, _passes),
    "shared": Step(
        ("RP", "rp"), lambda v, o: v / dist.get_world_size(o.group), _passes
    ),
    "of all": Step(
        ("SS",),
        lambda v, o: v * _listed(v.detach()).sum(0),
        lambda v, o: v * v.detach().sum(0),
        is_even=True,
    ),
}
# Steps that read x again, by what x is; its rows must be those of the value.
READS = {
    "S": Step(("SS", "rS"), lambda v, o: o.x * v),
    "R": Step(("RR", "rR", "pP"), lambda v, o: o.x * v),
}


@dataclass(frozen=True)
class Chain:
    """A drawn function: names of steps, and what its value is after each."""

    start: str
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    rows: int

    def run(self, operands: Operands, *, is_alone: bool) -> list[Any]:
        """The value after each step."""
        value, found = operands.x, []
        for name in self.names:
            step = READS[self.start] if name == "again" else STEPS[name]
            act = (step.alone or step.local) if is_alone else step.local
            value = act(value, operands)
            found.append(value)
        return found


def draw_chain(rng: random.Random, size: int) -> Chain:
    """Steps that are right one after the other."""
    start = rng.choice("SSSRP")
    rows = rng.choice((2 * size, 2 * size, size, 2 * size + 1, 2 * size - 1, 1))
    kind, names, kinds = start, [], []
    for _ in range(rng.randint(1, 5)):
        steps = STEPS | ({"again": READS[start]} if start in READS else {})
        possible = [
            (name, move[1])
            for name, step in steps.items()
            for move in step.moves
            if move[0] == kind and not (step.is_even and rows % size)
        ]
        name, kind = rng.choice(possible)
        names.append(name)
        kinds.append(kind)
    return Chain(start, tuple(names), tuple(kinds), rows)


def run_chain(seed: int) -> Outcome:
    """One drawn function with its right layouts, values and gradients."""
    rng = random.Random(seed)
    size = dist.get_world_size()
    chain = draw_chain(rng, size)
    kept = sorted({len(chain.names) - 1, rng.randrange(len(chain.names))})
    needs = rng.choice(((1, 1, 1), (1, 0, 0), (0, 1, 1), (0, 0, 1)))
    is_checked, has_shapes = rng.random() < 0.3, rng.random() < 0.5
    last = chain.kinds[-1].upper()
    is_wrong = size > 1 and last != "R" and rng.random() < 0.15
    torch.manual_seed(seed)
    values = [
        torch.randn(chain.rows, COLUMNS).double(),
        torch.randn(COLUMNS).double(),
        torch.randn(COLUMNS, COLUMNS).double(),
    ]
    case = (
        f"chain {seed} on {size} ranks: {chain}, outputs {kept}, gradients {needs}, "
        f"check={is_checked}, out_shapes={has_shapes}, declares too much={is_wrong}"
    )

    def run() -> str:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        layouts = [[LAYOUTS[chain.kinds[place].upper()]] for place in kept]
        if is_wrong:
            layouts[-1] = [R]
        shapes = [
            (chain.rows if chain.kinds[place].isupper() else 1, COLUMNS)
            for place in kept
        ]

        def body(x: Any, scale: Any, matrix: Any) -> Any:
            operands = Operands(x, scale, matrix, mesh.get_group(0))
            found = chain.run(operands, is_alone=False)
            return tuple(found[place] for place in kept)

        mapped = local_map(
            body,
            tuple(layouts),
            ([LAYOUTS[chain.start]], [R], [R]),
            out_shapes=tuple(shapes) if has_shapes else None,
            check=is_checked or is_wrong,
        )
        starts = (LAYOUTS[chain.start], R, R)
        tensors = [
            _distributed(value, mesh, layout).requires_grad_(bool(need))
            for value, layout, need in zip(values, starts, needs, strict=True)
        ]
        outputs = mapped(*tensors)
        if is_wrong:
            return _judge_wrong(outputs[-1])
        _backward([output.full_tensor() for output in outputs])
        alone = [
            value.clone().requires_grad_(bool(need))
            for value, need in zip(values, needs, strict=True)
        ]
        found = chain.run(Operands(*alone), is_alone=True)
        expected = [found[place] for place in kept]
        _backward(expected)
        difference = compare(
            [whole(output).detach() for output in outputs],
            [value.detach() for value in expected],
        )
        return difference or compare(_gradients(tensors), _gradients(alone))

    return outcome_of(case, run)


def _judge_wrong(output: Any) -> str:
    """What each rank has is declared equal; it is wrong unless it happens to be."""
    mine = output.to_local().detach().contiguous()
    sizes = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, tuple(mine.shape))
    if len(set(sizes)) > 1:
        return "other sizes by rank, which the check did not see"
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine)
    is_equal = all(torch.allclose(part, mine) for part in parts)
    return "" if is_equal else "other values by rank, which the check did not see"


def _backward(outputs: list[Any]) -> None:
    loss: Any = sum(output.square().sum() for output in outputs)
    if loss.requires_grad:
        loss.backward()


def _gradients(tensors: list[Any]) -> list[torch.Tensor]:
    """Zeros where there is none: one device and ranks differ in what is not used."""
    return [
        torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor.grad is None
        else whole(tensor.grad)
        for tensor in tensors
    ]


def run_case(seed: int) -> Outcome:
    """A plan for each even number; a body or a chain for each odd one."""
    kinds = (run_plan, run_mapped, run_plan, run_chain)
    return kinds[seed % 4](seed)


def run_cases(first: int, count: int) -> list[Outcome]:
    """Several cases in one go."""
    return [run_case(seed) for seed in range(first, first + count)]
