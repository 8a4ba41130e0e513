"""One call of a mapped function: tensors in, the function, tensors out."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchspmd import _torch
from torchspmd.layout.placements import Layout
from torchspmd.local.arguments import Argument, CallPlan, DTensorLeaf, Options
from torchspmd.local.boundary import (
    Copies,
    Enter,
    Leave,
    Port,
    cached_spec,
    inside,
    outside,
    with_version,
)
from torchspmd.local.check import (
    Checker,
    compare_shapes,
    is_asked_for,
    observe_reductions,
    refusing_together,
)
from torchspmd.local.evidence import (
    Evidence,
    Node,
    Unseen,
    Watch,
    describe_lost,
    describe_unseen,
    gather_evidence,
)
from torchspmd.local.frame import whole_stride
from torchspmd.local.gradient import BoundaryTensor, Gradients, derive, needs_evidence
from torchspmd.local.outputs import Output, build_outputs, build_shape
from torchspmd.local.specs import refuse

RULE = (
    "A gradient is derived only where layouts and the recorded graph leave one answer; "
    "see docs/local_map.md."
)
_LOST = "a gradient is lost"
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


class RegionCall:
    """The state of one call of a region, from entering to leaving."""

    def __init__(
        self, options: Options, plan: CallPlan, tensors: Sequence[DTensorLeaf]
    ) -> None:
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
            watch.watching(RegionCall._run_watched.__code__),
        ):
            result = self.options.function(*args, **kwargs)
        keep(self.plan.memo, key, watch.has_unseen)
        return result

    def leave(self, result: Any) -> Any:
        """The result with DTensors in place of tensors."""
        if isinstance(result, torch.Tensor):
            values, structure = [result], None
        else:
            values, structure = _torch.flatten_tree(result)
        if self.is_checked:
            with refusing_together(self.options.name, self.plan.frame, values):
                resolved, specs = self._resolve(values, structure, result)
            self._check(resolved.items, values)
        else:
            resolved, specs = self._resolve(values, structure, result)
        outputs = resolved.items
        entering = self._derive(resolved, values)
        for i, (output, spec) in enumerate(zip(outputs, specs, strict=True)):
            if spec is not None:
                grad = entering[i] if entering is not None else None
                values[i] = self._wrap(values[i], output, spec, grad)
        if structure is None:
            return values[0]
        return _torch.unflatten_tree(values, structure)

    def _resolve(
        self, values: list[Any], structure: Any, result: Any
    ) -> tuple[Outputs, list[Any]]:
        """What was written for each output, and its spec; refused as this rank sees it."""
        self.copies.refuse_writes(self.options.name, self.plan.frame)
        resolved = self._outputs(values, structure, result)
        specs = [
            self._spec((resolved.number, i), output, value)
            if output.layout is not None
            else None
            for i, (output, value) in enumerate(
                zip(resolved.items, values, strict=True)
            )
        ]
        return resolved, specs

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
        # A checked call compares the sizes themselves.
        if output.shape is None and not self.is_checked:
            compare_shapes(
                self.options, self.plan.frame, output, value, shape, self.shapes
            )
        layout = self.plan.frame.merge(output.layout, rest)
        stride = whole_stride(shape, value.stride())
        return cached_spec(mesh, layout, shape, stride, value.dtype)

    def _wrap(
        self, value: torch.Tensor, output: Output, spec: Any, grad: Layout | None
    ) -> DTensor:
        frame = self.plan.frame
        if grad is None:
            return outside(value, frame, spec)
        return Leave.apply(value, Port(output.name, frame, spec, grad))

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
        if not torch.is_grad_enabled():
            return None
        if not any(needs):
            lost = describe_lost(_list_unseen(self.watch, values), self.plan.frame.axes)
            refuse(self.options.name, self.plan.frame.mesh, _LOST, lost, RULE)
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
            problems += describe_lost(unseen, axes)
            what = "a gradient's layout cannot be derived"
            refuse(self.options.name, self.plan.frame.mesh, what, problems, RULE)
            keep(memo, key, gradients)
        return gradients

    def _rule_tensors(
        self, outputs: Sequence[Output], needs: Sequence[bool]
    ) -> tuple[list[BoundaryTensor], list[BoundaryTensor]]:
        """Arguments and outputs as the gradient rules see them."""
        arguments = [
            BoundaryTensor(a.name, a.layout, port is not None, a.written_grad)
            for a, port in zip(self.plan.arguments, self.ports, strict=True)
        ]
        # Other outputs than tensors take part as replicated ones without a gradient.
        nothing = (Replicate(),) * len(self.plan.frame.axes)
        tensors = [
            BoundaryTensor(output.name, output.layout or nothing, need, output.grad)
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
        # Where gradients enter as equal shares, equal partial values are in order.
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
