"""What goes into a region: which leaves are tensors on the mesh, and their layouts.

Runs once for each new combination of tree, mesh and layouts; the result is kept.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.comm import format_count
from torchspmd.layout.names import axis_names, format_mesh
from torchspmd.layout.placements import Layout, format_layout, positive_dims
from torchspmd.local.frame import Frame, build_frame, unknown_axes
from torchspmd.local.gradient import written_problem
from torchspmd.local.specs import (
    Path,
    Problem,
    Spec,
    SpecMismatchError,
    Written,
    find_written,
    format_path,
    is_layout,
    layout_problem,
    leftover_entries,
    refuse,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What ``local_map`` was called with; see there."""

    function: Callable[..., Any]
    name: str
    parameters: tuple[str, ...]
    out_placements: Spec
    in_placements: Spec
    in_grad_placements: Spec
    out_grad_placements: Spec
    out_shapes: Spec
    device_mesh: DeviceMesh | None
    axes: tuple[str, ...] | None
    redistribute_inputs: bool
    check: bool | None


@dataclass(frozen=True, slots=True)
class Argument:
    """One DTensor argument, as it enters the region.

    Attributes:
        name: For messages: ``args[1] 'k'``.
        layout: What the function sees, on the axes that it is local over.
        target: Layout on the whole mesh to redistribute to first; None to take it as is.
        written_grad: The gradient layout that the user wrote; None to derive it.
    """

    name: str
    layout: Layout
    target: Layout | None
    written_grad: Layout | None


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The layouts in which the arguments of one kind of call enter.

    Attributes:
        frame: Mesh and axes.
        arguments: One for each DTensor, in call order.
        memo: What was worked out about the results of such calls.
    """

    frame: Frame
    arguments: tuple[Argument, ...]
    memo: dict[Any, Any] = field(default_factory=dict, compare=False)


class DTensorLeaf(NamedTuple):
    """One DTensor among the arguments.

    Attributes:
        tensor: The DTensor.
        leaf: Index of its leaf.
        slot: For a module's parameter: its name, and the dict and key that hold it.
    """

    tensor: DTensor
    leaf: int
    slot: tuple[str, dict[str, Any], str] | None = None


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the arguments, with its place."""

    value: Any
    path: Path
    name: str


def find_dtensors(leaves: Sequence[Any]) -> list[DTensorLeaf]:
    """Every DTensor among the leaves, and inside the modules among them."""
    found = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, DTensor):
            found.append(DTensorLeaf(leaf, index))
        elif isinstance(leaf, torch.nn.Module):
            found += [
                DTensorLeaf(slot[1][slot[2]], index, slot)
                for slot in _torch.dtensor_slots(leaf)
            ]
    return found


def parameter_names(function: Any) -> tuple[str, ...]:
    """The names of a function's positional parameters; none where it has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)


def list_leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> list[Leaf]:
    """Every leaf of a call, positional arguments first."""
    values, _ = _torch.flatten_tree((args, kwargs))
    paths = _torch.leaf_paths((args, kwargs))
    return [
        Leaf(value, path, _leaf_name(path, names))
        for value, path in zip(values, paths, strict=True)
    ]


def _leaf_name(path: Path, names: Sequence[str]) -> str:
    side, step, *rest = path
    if side == 1:
        return f"kwargs{format_path((step, *rest))}"
    label = f" {names[step]!r}" if step < len(names) else ""
    return f"args[{step}]{label}{format_path(tuple(rest))}"


class ArgumentSpec:
    """Layouts that a user wrote for the arguments, looked up by leaf.

    They are one layout for all, a mapping by parameter name, one entry for each
    argument (each nested like it, or a prefix), or one entry for each leaf.
    """

    def __init__(self, option: str, spec: Spec, names: Sequence[str]) -> None:
        self.option = option
        self.spec = spec
        self.names = names

    def look_up(self, leaves: Sequence[Leaf]) -> tuple[list[Written], list[Problem]]:
        """What was written for each leaf, and every entry that does not fit."""
        try:
            paths = self._spec_paths(leaves)
        except SpecMismatchError as error:
            return [Written(None)] * len(leaves), [self._problem(str(error))]
        found, problems = [], []
        for path in paths:
            try:
                found.append(self._find(path))
            except SpecMismatchError as error:
                found.append(Written(None))
                problems.append(self._problem(str(error)))
        used = [path for path in paths if path is not None]
        problems += [self._problem(text) for text in self._leftover(used)]
        return found, problems

    def _find(self, path: Path | None) -> Written:
        if path is None:
            return Written(None)
        return find_written(self.spec, path, self.option)

    def _leftover(self, used: list[Path]) -> list[str]:
        # Trailing entries may belong to parameters that this call leaves out.
        passed = {path[0] for path in used if path}
        optional = {*range(len(self.names)), *self.names} - passed
        return leftover_entries(
            self.spec, used + [(step,) for step in optional], self.option
        )

    def _spec_paths(self, leaves: Sequence[Leaf]) -> list[Path | None]:
        """For each leaf, its path in the spec; None where the spec does not reach."""
        spec = self.spec
        if spec is None or is_layout(spec):
            return [()] * len(leaves)
        if isinstance(spec, Mapping):
            return [self._by_name(leaf.path) for leaf in leaves]
        if not isinstance(spec, (list, tuple)):
            raise SpecMismatchError(
                f"{self.option} is a {type(spec).__name__}, not a tuple or dict of layouts"
            )
        positional = [leaf for leaf in leaves if leaf.path[0] == 0]
        arguments = {leaf.path[:2] for leaf in leaves}
        num_args = len({path for path in arguments if path[0] == 0})
        if len(spec) != len(arguments) and len(spec) == len(positional):
            return [
                (index,) if leaf.path[0] == 0 else None
                for index, leaf in enumerate(leaves)
            ]
        if num_args > len(spec) or len(spec) > max(len(self.names), len(arguments)):
            entries = format_count(len(spec), "entry", "entries")
            passed = format_count(num_args, "argument", "arguments")
            leaf_count = format_count(len(positional), "leaf", "leaves")
            raise SpecMismatchError(
                f"{self.option} has {entries} for {passed} ({leaf_count})"
            )
        return [self._by_position(leaf.path, len(spec)) for leaf in leaves]

    def _by_name(self, path: Path) -> Path | None:
        side, step, *rest = path
        name = (
            step if side == 1 else self.names[step] if step < len(self.names) else None
        )
        return (name, *rest) if name in self.spec else None

    def _by_position(self, path: Path, num_entries: int) -> Path | None:
        side, step, *rest = path
        if side == 1:
            index = self.names.index(step) if step in self.names else num_entries
            return (index, *rest) if index < num_entries else None
        return (step, *rest)

    def _problem(self, text: str) -> Problem:
        return Problem(
            text,
            f"{self.option} has one entry for each argument, nested like the argument or "
            "one layout for all of it; None passes it as it is.",
        )


def resolve_argument(
    tensor: DTensor,
    name: str,
    written: Written,
    written_grad: Written,
    frame: Frame,
    redistribute: bool,
) -> tuple[Argument, list[Problem]]:
    """How one DTensor enters, and what is wrong with what was written for it."""
    num_axes, ndim = len(frame.axes), tensor.ndim
    for entry in (written, written_grad):
        bad = entry.layout and layout_problem(entry.layout, num_axes, ndim)
        if bad:
            change = f"Write {num_axes} placements in {entry.where}, one for each axis."
            argument = Argument(name, frame.pick(tensor.placements), None, None)
            return argument, [Problem(f"{name}: {entry.where} = {bad}", change)]
    current = frame.pick(tensor.placements)
    wanted = positive_dims(written.layout, ndim) if written.layout else current
    grad = positive_dims(written_grad.layout, ndim) if written_grad.layout else None
    problems = []
    if wanted != current:
        problems += _mismatch(name, current, wanted, written, redistribute)
    if grad is not None and (bad := written_problem(wanted, grad)):
        change = (
            f"Write {format_layout(wanted)}-shaped entries in {written_grad.where}."
        )
        problems.append(Problem(f"{name}: {bad}", change))
    target = frame.merge(wanted, frame.pick_rest(tensor.placements))
    if frame.rest is not None and (bad := frame.crossed_dim(target)):
        problems.append(Problem(f"{name}: {bad}", CROSSED))
    needs_target = wanted != current
    return Argument(name, wanted, target if needs_target else None, grad), problems


CROSSED = (
    "Cut that dim over one of the two axes only, or make every axis local: "
    "leave axes= out."
)


def _mismatch(
    name: str, current: Layout, wanted: Layout, written: Written, redistribute: bool
) -> list[Problem]:
    text = (
        f"{name}: has {format_layout(current)}; {written.where} asks "
        f"{format_layout(wanted)}"
    )
    becomes_partial = any(
        want.is_partial() and want != have
        for want, have in zip(wanted, current, strict=True)
    )
    use_current = f"write {written.where} = {format_layout(current)}"
    if becomes_partial:
        change = f"Nothing can be redistributed to Partial(): {use_current}."
        return [Problem(text, change)]
    if redistribute:
        return []
    return [
        Problem(
            text,
            "If the arguments are to be redistributed, set redistribute_inputs=True; "
            f"or {use_current}.",
        )
    ]


def non_tensor_problems(leaf: Leaf, written: Written) -> list[Problem]:
    """A layout that was written for something that is not a tensor."""
    is_fine = isinstance(leaf.value, (torch.Tensor, torch.nn.Module))
    if is_fine or written.layout is None or not written.is_exact:
        return []
    return [
        Problem(
            f"{leaf.name}: is of type {type(leaf.value).__name__}; {written.where} asks "
            f"{format_layout(written.layout)}",
            f"Write {written.where} = None: only tensors have a layout.",
        )
    ]


def build_plan(
    options: Options,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[DTensorLeaf],
) -> CallPlan:
    """Resolve what was written for the arguments of a call, or raise once for all."""
    leaves = list_leaves(args, kwargs, options.parameters)
    frame = _resolve_frame(options, leaves, tensors)
    names = options.parameters
    specs = (
        ArgumentSpec("in_placements", options.in_placements, names),
        ArgumentSpec("in_grad_placements", options.in_grad_placements, names),
    )
    (written, bad), (grads, bad_grads) = (spec.look_up(leaves) for spec in specs)
    rule = "Layouts are matched to arguments by position or by parameter name."
    refuse(options.name, frame.mesh, "layouts do not fit", [*bad, *bad_grads], rule)
    problems: list[Problem] = []
    for leaf, entry in zip(leaves, written, strict=True):
        problems += non_tensor_problems(leaf, entry)
    arguments = []
    for found in tensors:
        argument, more = resolve_argument(
            found.tensor,
            _name(leaves[found.leaf], found),
            written[found.leaf],
            grads[found.leaf],
            frame,
            options.redistribute_inputs,
        )
        arguments.append(argument)
        problems += more
    rule = "Each argument must have the layout of its entry in in_placements."
    refuse(options.name, frame.mesh, "layouts do not match", problems, rule)
    return CallPlan(frame, tuple(arguments))


def _name(leaf: Leaf, found: DTensorLeaf) -> str:
    return leaf.name if found.slot is None else f"{leaf.name}.{found.slot[0]}"


def _resolve_frame(
    options: Options, leaves: Sequence[Leaf], tensors: Sequence[DTensorLeaf]
) -> Frame:
    mesh = options.device_mesh or tensors[0].tensor.device_mesh
    problems = [
        Problem(
            f"{_name(leaves[found.leaf], found)}: is on mesh "
            f"({format_mesh(found.tensor.device_mesh)})",
            "Bring all arguments to one mesh first, or leave device_mesh= out to use "
            "the arguments' own.",
        )
        for found in tensors
        if found.tensor.device_mesh != mesh
    ]
    what = "arguments are on two meshes"
    refuse(options.name, mesh, what, problems, "A region runs on one mesh.")
    problems = [
        Problem(
            f"axes={options.axes!r}: the mesh has no axis {name!r}",
            f"Choose among: {', '.join(axis_names(mesh))}.",
        )
        for name in unknown_axes(mesh, options.axes)
    ]
    refuse(options.name, mesh, "unknown axis", problems, "axes= names mesh axes.")
    return build_frame(mesh, options.axes)
