"""One call of a mapped function: tensors in, the function, tensors out."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from torchspmd import _torch
from torchspmd.local.arguments import Argument
from torchspmd.local.boundary import Enter, Leave, Port, cached_spec, inside, outside
from torchspmd.local.check import Checker, is_asked_for, observe_reductions
from torchspmd.local.evidence import Evidence, Node, gather_evidence, group_axes
from torchspmd.local.frame import Frame
from torchspmd.local.gradient import Axis, Crossing, Gradients, derive, needs_evidence
from torchspmd.local.layout import Layout, Problem, format_layout, refuse
from torchspmd.local.outputs import Output
from torchspmd.local.plan import OnMesh, Options, Plan, build_outputs, build_shape
from torchspmd.local.shapes import whole_stride

# ----------------------------------------------------------------------------
# Writes of a function into arguments that were redistributed for it.

_RULE = "A redistributed argument is a copy: what is written into it is lost."


class _Copy(NamedTuple):
    name: str
    placements: tuple[Placement, ...]
    local: torch.Tensor
    version: int


class Copies:
    """The redistributed arguments of one call."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def add(self, name: str, given: DTensor, seen: torch.Tensor) -> None:
        """Note what the function sees of an argument's copy."""
        local = _torch.local_tensor(seen) if isinstance(seen, DTensor) else seen
        version = _torch.version_of(local)
        self._copies.append(_Copy(name, given.placements, local, version))

    def refuse_writes(self, function: str, frame: Frame) -> None:
        """Raise if the function wrote into a copy."""
        problems = [
            Problem(
                f"{copy.name}: has {format_layout(copy.placements)}, and the function "
                "wrote into the copy that redistribute_inputs=True made of it",
                f"Redistribute {copy.name} before the call and keep that DTensor; or "
                "return the new value as an output.",
            )
            for copy in self._copies
            if _torch.version_of(copy.local) != copy.version
        ]
        refuse(function, frame.mesh, "a write would be lost", problems, _RULE)


def with_version(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or for an inference tensor a twin on its memory that counts writes."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return twin.set_(
            tensor.untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )


# ----------------------------------------------------------------------------
# In-place collectives that autograd does not see.
#
# ``dist.all_reduce`` writes into its argument, and the recorded graph says nothing of it:
# what depends on other ranks seems to depend on this one alone. Only watching calls tells.
# That costs some microseconds for each operator, so the first call of each kind is watched,
# and further ones only where the function has called in-place collectives at all.

_IN_PLACE = "c10d::"
_NOTHING_WRITTEN = ("c10d::send", "c10d::barrier", "c10d::monitored_barrier_")


class Unseen(NamedTuple):
    """An in-place collective over an axis (by number), on a tensor with a gradient."""

    axis: int
    operator: str


class Watch:
    """The in-place collectives of one call.

    Attributes:
        has_written: Some were called.
        unseen: Those that wrote into memory that a tensor with a gradient reads.
    """

    def __init__(self, frame: Frame) -> None:
        self.has_written = False
        self.unseen: set[Unseen] = set()
        self._axes = {axis.index for axis in frame.axes if axis.size > 1}
        self._mesh = frame.mesh
        self._caller: CodeType | None = None
        # By memory; the tensor is held, so that the memory stays its own.
        self._written: dict[int, tuple[torch.Tensor, frozenset[Unseen]]] = {}

    @contextmanager
    def watching(self, caller: CodeType) -> Iterator[None]:
        """Watch what runs inside, called from this code."""
        self._caller = caller
        with _torch.observe_calls(self._note):
            yield

    def look_at(self, values: Any) -> None:
        """Tell of tensors with a gradient that lie in memory written before."""
        if not self._written:
            return
        for tensor in _tensors(values):
            if not tensor.requires_grad or isinstance(tensor, DTensor):
                continue
            target, writes = self._written.get(
                _torch.storage_key(tensor), (None, frozenset())
            )
            # A received tensor may become a leaf of the function's own.
            if target is not None and not target.requires_grad:
                self.unseen |= writes

    def _note(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.look_at((args, kwargs))
        name = _torch.packet_name(op)
        if not name.startswith(_IN_PLACE) or name in _NOTHING_WRITTEN:
            return
        self.has_written = True
        given = dict(zip(_torch.argument_names(op), args, strict=False), **kwargs)
        group = _torch.resolve_group(given.get("process_group"))
        # A custom function has its own backward, and is opaque to the rules as a whole.
        if group is None or _torch.is_in_custom_function(self._caller):
            return
        axes = group_axes(self._mesh, group) & self._axes
        writes = frozenset(Unseen(axis, name) for axis in axes)
        for tensor in _tensors(next(iter(given.values()))):
            if tensor.requires_grad:
                self.unseen |= writes
            elif writes:
                self._written[_torch.storage_key(tensor)] = tensor, writes


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))


def describe_unseen(
    unseen: Sequence[Unseen], axes: Sequence[Axis]
) -> dict[int, list[Problem]]:
    """The problem with each in-place collective, by axis number."""
    names = {axis.index: axis.name for axis in axes}
    problems: dict[int, list[Problem]] = {}
    for index, operator in unseen:
        name = names[index]
        problem = Problem(
            f"{operator} over {name!r}: was called in place on a tensor with a "
            "gradient; autograd does not see it",
            "Reduce by a collective with a backward (functional collectives, or "
            f"torch.distributed.nn), or return the term as Partial() over {name!r} "
            "and let DTensor reduce it. If no gradient is to pass, reduce a copy: "
            "t.detach().clone(). If its backward passes the gradient on as it is, write "
            "in_grad_placements=... for every argument, or out_grad_placements=... for "
            "every output.",
        )
        problems.setdefault(index, []).append(problem)
    return problems


RULE = (
    "A gradient is derived only where layouts and the recorded graph leave one answer; "
    "see docs/local_map.md."
)
_MAX_KEPT = 256  # entries of one table; a program has few, a leak would have many


def keep(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value for the next call, in bounded memory."""
    if len(table) >= _MAX_KEPT:
        table.clear()
    table[key] = value


@dataclass(frozen=True, slots=True)
class Outputs:
    """What was resolved for one kind of result, with a number of its own for keys."""

    items: tuple[Output, ...]
    number: int


_numbers = itertools.count()


class Call:
    """The state of one call, between the way in and the way out."""

    def __init__(self, options: Options, plan: Plan, tensors: Sequence[OnMesh]) -> None:
        self.options = options
        self.plan = plan
        self.tensors = tensors
        self.shapes = tuple([t.tensor.shape for t in tensors])
        self.is_checked = is_asked_for(options.check)
        self.reduced: set[int] = set()
        self.ports: list[Port | None] = []
        self.nodes: dict[Node, int] = {}
        self.locals: list[torch.Tensor] = []
        self.copies = Copies()
        self.watch: Watch | None = None

    def enter(self, leaves: list[Any]) -> list[Any]:
        """The leaves with what the function sees in place of each DTensor."""
        has_grad = torch.is_grad_enabled()
        if has_grad:
            _note_plain(leaves, self.nodes)
        frame = self.plan.frame
        for index, (found, argument) in enumerate(
            zip(self.tensors, self.plan.arguments, strict=True)
        ):
            tensor, port = found.tensor, None
            if argument.target is not None:
                tensor = tensor.redistribute(placements=argument.target)
            spec = _torch.spec(tensor)
            if has_grad and tensor.requires_grad:
                port = Port(argument.name, frame, spec, is_leaf=tensor.is_leaf)
                local = Enter.apply(tensor, port)
                self.nodes[local.grad_fn] = index
            else:
                local = _torch.finished(_torch.local_tensor(tensor)).detach()
                if argument.target is not None:
                    local = with_version(local)
                local = inside(local, frame, spec)
            if argument.target is not None:
                self.copies.add(argument.name, found.tensor, local)
            self.ports.append(port)
            self.locals.append(local)
            if found.slot is None:
                leaves[found.leaf] = local
        return leaves

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, with local parameters in the modules among its arguments."""
        slots = [
            (found.slot, found.tensor, local)
            for found, local in zip(self.tensors, self.locals, strict=True)
            if found.slot is not None
        ]
        try:
            for (_, table, key), _, local in slots:
                table[key] = local
            return self._run_watched(args, kwargs)
        finally:
            for (_, table, key), tensor, _ in slots:
                table[key] = tensor

    def _run_watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = ("writes", tuple([port is not None for port in self.ports]))
        if not self.is_checked:
            if not any(self.ports) or not self.plan.memo.get(key, True):
                return self.options.function(*args, **kwargs)
        self.watch = watch = Watch(self.plan.frame)
        with (
            observe_reductions(self.plan.frame, self.reduced, self.is_checked),
            watch.watching(Call._run_watched.__code__),
        ):
            result = self.options.function(*args, **kwargs)
        keep(self.plan.memo, key, watch.has_written)
        return result

    def leave(self, result: Any) -> Any:
        """The result with DTensors in place of tensors."""
        self.copies.refuse_writes(self.options.name, self.plan.frame)
        if isinstance(result, torch.Tensor):
            values, structure = [result], None
        else:
            values, structure = _torch.flatten_tree(result)
        resolved = self._outputs(values, structure, result)
        outputs = resolved.items
        specs = [
            self._spec((resolved.number, i), output, value)
            if output.layout is not None
            else None
            for i, (output, value) in enumerate(zip(outputs, values, strict=True))
        ]
        if self.is_checked:
            self._check(outputs, values)
        entering = self._derive(resolved, values)
        for i, (output, spec) in enumerate(zip(outputs, specs, strict=True)):
            if spec is not None:
                grad = entering[i] if entering is not None else None
                values[i] = self._wrap(values[i], output, spec, grad)
        if structure is None:
            return values[0]
        return _torch.unflatten_tree(values, structure)

    def _outputs(self, values: list[Any], structure: Any, result: Any) -> Outputs:
        kinds = [
            (type(v), getattr(v, "ndim", None), getattr(v, "placements", None))
            for v in values
        ]
        key = ("outputs", structure, tuple(kinds))
        outputs: Outputs | None = self.plan.memo.get(key)
        if outputs is None:
            items = build_outputs(self.options, self.plan.frame, values, result)
            outputs = Outputs(tuple(items), next(_numbers))
            keep(self.plan.memo, key, outputs)
        return outputs

    def _spec(self, place: Any, output: Output, value: torch.Tensor) -> Any:
        """The spec of the DTensor around an output."""
        rest = value.placements if isinstance(value, DTensor) else ()
        key = (place, value.shape, value.stride(), value.dtype, self.shapes, rest)
        try:
            spec = self.plan.memo.get(key)
        except TypeError:  # symbolic sizes have no hash
            return self._build_spec(output, value, rest)
        if spec is None:
            spec = self._build_spec(output, value, rest)
            keep(self.plan.memo, key, spec)
        return spec

    def _build_spec(self, output: Output, value: torch.Tensor, rest: Layout) -> Any:
        mesh = self.plan.frame.mesh
        assert output.layout is not None
        shape = build_shape(self.options, self.plan, output, value.shape, self.shapes)
        layout = self.plan.frame.merge(output.layout, rest)
        stride = whole_stride(shape, value.stride())
        return cached_spec(mesh, layout, shape, stride, value.dtype)

    def _wrap(
        self, value: torch.Tensor, output: Output, spec: Any, grad: Layout | None
    ) -> DTensor:
        frame = self.plan.frame
        if grad is None:
            return outside(value, frame, spec)
        wrapped: DTensor = Leave.apply(value, Port(output.name, frame, spec, grad))
        return wrapped

    def _derive(
        self, outputs: Outputs, values: Sequence[Any]
    ) -> list[Layout | None] | None:
        """Complete the ports; what enters at each output, None where nothing can."""
        needs = tuple(
            [
                output.layout is not None and value.requires_grad
                for output, value in zip(outputs.items, values, strict=True)
            ]
        )
        if not any(needs) or not torch.is_grad_enabled():
            return None
        gradients = self._gradients(outputs, values, needs)
        checker = self._checker(gradients) if self.is_checked else None
        for port, layout in zip(self.ports, gradients.arguments, strict=True):
            if port is not None:
                port.grad, port.checker = layout, checker
        return list(gradients.outputs)

    def _gradients(
        self, outputs: Outputs, values: Sequence[Any], needs: tuple[bool, ...]
    ) -> Gradients:
        """Gradient layouts, derived or refused; kept for calls with the same evidence."""
        memo = self.plan.memo
        kind = (outputs.number, needs, tuple([port is None for port in self.ports]))
        questions = memo.get(("questions", kind))
        if questions is None:
            tensors = self._rule_tensors(outputs.items, needs)[1]
            questions = needs_evidence(tensors, self.plan.frame.axes)
            keep(memo, ("questions", kind), questions)
        found = {o: self._evidence(values[o]) for o in {o for o, _ in questions}}
        evidence = {(o, a): found[o][a] for o, a in questions}
        unseen = _list_unseen(self.watch, values)
        key = (kind, tuple(evidence.values()), unseen)
        gradients: Gradients | None = memo.get(key)
        if gradients is None:
            arguments, tensors = self._rule_tensors(outputs.items, needs)
            axes = self.plan.frame.axes
            hidden = describe_unseen(unseen, axes)
            gradients, problems = derive(
                arguments, tensors, axes, lambda o, a: evidence[o, a], hidden
            )
            what = "a gradient's layout cannot be derived"
            refuse(self.options.name, self.plan.frame.mesh, what, problems, RULE)
            keep(memo, key, gradients)
        return gradients

    def _rule_tensors(
        self, outputs: Sequence[Output], needs: Sequence[bool]
    ) -> tuple[list[Crossing], list[Crossing]]:
        """Arguments and outputs as the gradient rules see them."""
        arguments = [
            Crossing(a.name, a.layout, port is not None, a.written_grad)
            for a, port in zip(self.plan.arguments, self.ports, strict=True)
        ]
        # What is no tensor takes part as a replicated one without a gradient.
        nothing = (Replicate(),) * len(self.plan.frame.axes)
        tensors = [
            Crossing(output.name, output.layout or nothing, need, output.grad)
            for output, need in zip(outputs, needs, strict=True)
        ]
        return arguments, tensors

    def _evidence(self, value: torch.Tensor) -> list[Evidence]:
        """What the recorded graph says about an output, for each axis."""
        frame = self.plan.frame
        if value.grad_fn is None:  # a leaf of the function's own
            nothing = Evidence((), has_collective=False, has_opaque=False)
            return [nothing] * len(frame.axes)
        axes = [axis.index for axis in frame.axes]
        return gather_evidence(value.grad_fn, self.nodes, frame.mesh, axes)

    def _checker(self, gradients: Gradients | None = None) -> Checker:
        reduced = set(self.reduced)
        # Where gradients enter as equal shares, equal terms of a sum are in order.
        for layout in gradients.outputs if gradients is not None else ():
            for axis, entry in zip(self.plan.frame.axes, layout or (), strict=False):
                if entry.is_partial():
                    reduced.discard(axis.index)
        return Checker(self.options.name, self.plan.frame, frozenset(reduced))

    def _check(self, outputs: Sequence[Output], values: Sequence[Any]) -> None:
        """Compare outputs across ranks, and note which axes backward may reduce over."""
        checker = self._checker()
        axes, arguments = self.plan.frame.axes, self.plan.arguments
        for output, value in zip(outputs, values, strict=True):
            if output.layout is None:
                continue
            evidence: Sequence[Evidence | None] = [None] * len(axes)
            if value.requires_grad:
                evidence = self._evidence(value)
            summed = [
                axis.index in self.reduced and _is_summed(arguments, found, position)
                for position, (axis, found) in enumerate(
                    zip(axes, evidence, strict=True)
                )
            ]
            local = (
                value if self.plan.frame.rest is None else _torch.local_tensor(value)
            )
            local = _torch.finished(local).detach()
            has_graph = evidence[0] is not None
            checker.check_output(local, output.layout, output.name, summed, has_graph)
            for axis, found in zip(axes, evidence, strict=True):
                if found and (found.has_collective or found.has_opaque):
                    self.reduced.add(axis.index)


def _note_plain(leaves: Sequence[Any], nodes: dict[Node, int]) -> None:
    """The graph behind a plain tensor is not the region's."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
            if leaf.grad_fn is not None:
                nodes[leaf.grad_fn] = -1


def _list_unseen(watch: Watch | None, values: Sequence[Any]) -> tuple[Unseen, ...]:
    if watch is None:
        return ()
    watch.look_at(values)
    return tuple(sorted(watch.unseen))


def _is_summed(
    arguments: Sequence[Argument], found: Evidence | None, position: int
) -> bool:
    """Whether nothing that differs between ranks comes past a reduction."""
    if found is None:
        return True
    return all(
        arguments[i].layout[position].is_replicate() or via for i, via in found.bare
    )
