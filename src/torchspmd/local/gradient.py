"""The layout of every gradient that leaves or enters a region, derived or refused.

[Note: gradient rules]
Each rank's autograd computes the derivative of the sum over all ranks of
<output gradient, output>, provided that the backward of every collective is the exact
transpose of its forward. So if the output gradients of all ranks add up to the true one,
the gradient of a sharded argument is its shard, that of a partial argument is the same on
every rank, and that of a replicated argument is a partial sum. Shard and Partial outputs
fulfil this as they are. A Replicate output hands the whole gradient to every rank, n times
the true one, and so must be divided by n; unless nothing differs between the ranks of the
axis, when each rank simply does the same work, and gradients stay as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from torch.distributed.tensor import Partial, Placement, Replicate

from torchspmd.layout.placements import Layout, format_layout, reduce_op, shard_dim
from torchspmd.local.evidence import Evidence
from torchspmd.local.frame import LocalAxis
from torchspmd.local.specs import Problem


@dataclass(frozen=True, slots=True)
class BoundaryTensor:
    """An argument or output of the region, as the gradient rules see it.

    Attributes:
        name: For messages.
        layout: Its layout on the axes that the region is local over.
        needs_grad: A gradient passes through it.
        written: The gradient layout that the user wrote for it, if any.
    """

    name: str
    layout: Layout
    needs_grad: bool
    written: Layout | None = None


@dataclass(frozen=True, slots=True)
class Gradients:
    """The result: gradient layouts of arguments, and what enters at each output.

    An entering ``Partial`` means that every rank gets an equal share of the gradient.

    Attributes:
        works: What the ranks along each axis do.
        arguments: For each argument; None where no gradient passes.
        outputs: For each output; None where no gradient passes.
    """

    works: "tuple[Work, ...]"
    arguments: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]


class Work(Enum):
    """What the ranks along one axis do."""

    SAME = "same"  # every rank computes the same thing
    SPLIT = "split"  # each rank contributes its part
    DECLARED = "declared"  # split, and the user wrote what enters


FindEvidence = Callable[[int, int], Evidence]  # (output, axis)


def derive(
    arguments: Sequence[BoundaryTensor],
    outputs: Sequence[BoundaryTensor],
    axes: Sequence[LocalAxis],
    find_evidence: FindEvidence | None,
    unseen: Mapping[int, list[Problem]] | None = None,
) -> tuple[Gradients, list[Problem]]:
    """Gradient layouts of a call, and every reason why they cannot be derived.

    Args:
        arguments: All tensors on the mesh that go in.
        outputs: All tensors that come out.
        axes: The axes that the region is local over, in the order of the layouts.
        find_evidence: What the recorded graph says; None when there is none to read.
        unseen: By axis number, collectives that are not in the recorded graph.
    """
    problems: list[Problem] = []
    works = []
    for position, axis in enumerate(axes):
        work, found = _work(arguments, outputs, position, axis, find_evidence)
        hidden = unseen.get(axis.index) if unseen else None
        if hidden and not found and not _all_written(outputs):
            work, found = _accept_if_written(arguments, hidden)
        works.append(work)
        problems += found
        problems += _op_problems(arguments, outputs, position, axis)
        if work is Work.SPLIT and _divides(outputs, position):
            problems += _averaged(arguments, position, axis)
    gradients = Gradients(
        tuple(works),
        tuple(leaving_layout(tensor, works, axes) for tensor in arguments),
        tuple(entering_layout(tensor, works, axes) for tensor in outputs),
    )
    return gradients, problems


def leaving_layout(
    argument: BoundaryTensor, works: Sequence[Work], axes: Sequence[LocalAxis]
) -> Layout | None:
    """Layout of the gradient that leaves at an argument."""
    derived = tuple(map(_argument_entry, argument.layout, works, axes))
    return _choose(argument, derived)


def entering_layout(
    output: BoundaryTensor, works: Sequence[Work], axes: Sequence[LocalAxis]
) -> Layout | None:
    """Layout of the gradient that enters at an output."""
    derived = tuple(map(_output_entry, output.layout, works, axes))
    return _choose(output, derived)


def count_shares(entering: Layout, axes: Sequence[LocalAxis]) -> int:
    """Into how many equal shares an entering gradient is divided."""
    num_shares = 1
    for axis, entry in zip(axes, entering, strict=True):
        num_shares *= axis.size if entry.is_partial() else 1
    return num_shares


def _choose(tensor: BoundaryTensor, derived: Sequence[Placement]) -> Layout | None:
    if not tensor.needs_grad:
        return None
    return tensor.written if tensor.written is not None else tuple(derived)


def needs_evidence(
    outputs: Sequence[BoundaryTensor], axes: Sequence[LocalAxis]
) -> list[tuple[int, int]]:
    """The (output, axis position) pairs about which the recorded graph must be read."""
    return [
        (index, position)
        for position, axis in enumerate(axes)
        for index, output in enumerate(outputs)
        if axis.size > 1
        and output.needs_grad
        and output.layout[position].is_replicate()
        and output.written is None
    ]


def _work(
    arguments: Sequence[BoundaryTensor],
    outputs: Sequence[BoundaryTensor],
    position: int,
    axis: LocalAxis,
    find_evidence: FindEvidence | None,
) -> tuple[Work, list[Problem]]:
    if axis.size == 1:
        return Work.SAME, []
    varying = [i for i, t in enumerate(arguments) if _varies(t, position)]
    whole = [
        i
        for i, t in enumerate(outputs)
        if t.needs_grad and t.layout[position].is_replicate()
    ]
    split = any(t.needs_grad and _varies(t, position) for t in outputs)
    if not whole:
        return Work.SPLIT, []
    if all(outputs[i].written is not None for i in whole):
        return _declared(outputs, whole, position, bool(varying) or split), []
    if find_evidence is None:
        return _without_evidence(arguments, outputs, whole, axis)
    evidence = {
        i: find_evidence(i, position) for i in whole if outputs[i].written is None
    }
    if not varying and not split:
        if any(e.has_collective for e in evidence.values()):
            return Work.SPLIT, []
        is_sure = not any(e.has_opaque for e in evidence.values())
        redundant = _redundant(arguments, position, axis) if is_sure else []
        return Work.SAME, redundant
    return _judge(arguments, outputs, varying, evidence, axis)


def _varies(tensor: BoundaryTensor, position: int) -> bool:
    return not tensor.layout[position].is_replicate()


def _declared(
    outputs: Sequence[BoundaryTensor],
    whole: Sequence[int],
    position: int,
    is_split: bool,
) -> Work:
    shared = any(
        reduce_op(written[position]) is not None
        for i in whole
        if (written := outputs[i].written) is not None
    )
    return Work.SPLIT if shared else Work.DECLARED if is_split else Work.SAME


def _judge(
    arguments: Sequence[BoundaryTensor],
    outputs: Sequence[BoundaryTensor],
    varying: Sequence[int],
    evidence: Mapping[int, Evidence],
    axis: LocalAxis,
) -> tuple[Work, list[Problem]]:
    """Split work with a replicated output: is the reduction one that we understand?"""
    problems = [
        _unclear(outputs[o].name, arguments[i].name, arguments[i].layout, axis, via)
        for o, found in evidence.items()
        for i, via in found.bare
        if i in varying
    ]
    if not problems:
        return Work.SPLIT, []
    return _accept_if_written(arguments, problems)


def _without_evidence(
    arguments: Sequence[BoundaryTensor],
    outputs: Sequence[BoundaryTensor],
    whole: Sequence[int],
    axis: LocalAxis,
) -> tuple[Work, list[Problem]]:
    """A replicated output may have been reduced inside, which cannot be known."""
    problems = [
        Problem(
            f"{outputs[o].name}: is Replicate() over {axis.name!r}; torch.compile is "
            "tracing, so a reduction inside cannot be seen",
            "Write out_grad_placements=[Replicate()] if no collective is inside, "
            "[Partial()] if it is reduced there by a collective with a backward; or "
            f"return it as Partial() over {axis.name!r} and let DTensor reduce it.",
        )
        for o in whole
        if outputs[o].written is None
    ]
    return _accept_if_written(arguments, problems)


def _accept_if_written(
    arguments: Sequence[BoundaryTensor], problems: list[Problem]
) -> tuple[Work, list[Problem]]:
    """Gradient layouts written for every argument say that the user knows."""
    if _all_written(arguments):
        return Work.DECLARED, []
    return Work.SPLIT, problems


def _all_written(tensors: Sequence[BoundaryTensor]) -> bool:
    return all(t.written is not None for t in tensors if t.needs_grad)


def _unclear(
    output: str, argument: str, layout: Layout, axis: LocalAxis, via: str
) -> Problem:
    if via:
        how = f"the custom autograd function {via!r} is between them"
    else:
        how = "no differentiable collective is between them"
    return Problem(
        f"{argument}: has {format_layout(layout)}, while {output} is Replicate() over "
        f"{axis.name!r}; {how}",
        f"Return {output} as Partial() over {axis.name!r} and let DTensor reduce it; or, "
        "if the reduction's backward passes the gradient on as it is, write "
        "out_grad_placements=[Replicate()] or in_grad_placements=... for every argument; "
        "or, if its backward sums over the ranks, out_grad_placements=[Partial()].",
    )


def _redundant(
    arguments: Sequence[BoundaryTensor], position: int, axis: LocalAxis
) -> list[Problem]:
    return [
        Problem(
            f"{t.name}: in_grad_placements asks {format_layout(t.written)}, but every "
            f"rank of {axis.name!r} computes the whole gradient",
            f"Write Replicate() for {axis.name!r}: reducing it would multiply the "
            f"gradient by {axis.size}.",
        )
        for t in arguments
        if t.needs_grad
        and t.written is not None
        and t.layout[position].is_replicate()
        and t.written[position].is_partial()
    ]


def _divides(outputs: Sequence[BoundaryTensor], position: int) -> bool:
    return any(
        t.needs_grad and t.written is None and t.layout[position].is_replicate()
        for t in outputs
    )


def _averaged(
    arguments: Sequence[BoundaryTensor], position: int, axis: LocalAxis
) -> list[Problem]:
    """A mean of gradients that were divided by n already would divide twice."""
    return [
        Problem(
            f"{t.name}: in_grad_placements asks {format_layout(t.written)}, but what "
            f"enters the region is divided by the {axis.size} ranks of {axis.name!r}",
            f"Write Partial() for {axis.name!r}, or out_grad_placements=[Replicate()] "
            "to let the whole gradient enter on every rank.",
        )
        for t in arguments
        if t.needs_grad
        and t.written is not None
        and reduce_op(t.written[position]) == "avg"
    ]


def _argument_entry(entry: Placement, work: Work, axis: LocalAxis) -> Placement:
    if entry.is_partial():
        return Replicate()
    if entry.is_replicate() and work is not Work.SAME and axis.size > 1:
        return Partial()
    return entry


def _output_entry(entry: Placement, work: Work, axis: LocalAxis) -> Placement:
    if axis.size == 1:
        return Replicate() if entry.is_partial() else entry
    if entry.is_partial():
        return Replicate() if reduce_op(entry) == "sum" else Partial()
    if entry.is_replicate() and work is Work.SPLIT:
        return Partial()
    return entry


def _op_problems(
    arguments: Sequence[BoundaryTensor],
    outputs: Sequence[BoundaryTensor],
    position: int,
    axis: LocalAxis,
) -> list[Problem]:
    """Partial tensors that are not reduced by a sum have other gradients on each rank."""
    allowed = [(t, ("sum",)) for t in arguments] + [
        (t, ("sum", "avg")) for t in outputs
    ]
    return [
        Problem(
            f"{t.name}: has {format_layout(t.layout)}; the gradient through a reduction "
            f"by {op!r} over {axis.name!r} does not follow from layouts",
            f"Redistribute {t.name} to Replicate() over {axis.name!r} outside of the "
            "region, or reduce by sum.",
        )
        for t, ops in allowed
        if t.needs_grad
        and axis.size > 1
        and (op := reduce_op(t.layout[position])) is not None
        and op not in ops
    ]


def written_problem(layout: Layout, written: Layout) -> str | None:
    """Why a gradient cannot have the layout that was written; None where it can.

    A rank's gradient has the shape of the rank's part, so a sharded dim stays sharded.

    >>> from torch.distributed.tensor import Shard
    >>> written_problem((Shard(0),), (Replicate(),))
    'is sharded as [Shard(0)], and so is its gradient; [Replicate()] has another shape'
    """
    for entry, wanted in zip(layout, written, strict=True):
        is_sharded = shard_dim(entry) is not None or shard_dim(wanted) is not None
        if is_sharded and entry != wanted:
            return (
                f"is sharded as {format_layout(layout)}, and so is its gradient; "
                f"{format_layout(written)} has another shape"
            )
    return None
