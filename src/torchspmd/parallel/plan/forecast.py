"""The communication that a plan will cause: that of its own layers, on shapes.

A copy of the model gets the plan's styles, on a private group that has no other ranks, and
makes one forward and backward without values, as rank 0 of the axis. What its layers send
is recorded as in a real run, so a forecast and a run cannot differ. Where the model does
not run so, each layer with a style is run by itself.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchspmd import _torch
from torchspmd.comm import GLOBAL, CommEvent, Group, Ledger, Operator, Phase, measure
from torchspmd.layout.placements import positive_dim
from torchspmd.layout.shards import shard_size
from torchspmd.parallel.axis import Axis, PlanMesh
from torchspmd.parallel.linear import linear_form
from torchspmd.parallel.plan.assignment import (
    Assignment,
    own_style,
    place,
    taken_layouts,
)
from torchspmd.parallel.plan.copies import copy_shapes
from torchspmd.parallel.plan.names import fold
from torchspmd.parallel.plan.resolve import Resolved
from torchspmd.parallel.plan.run import (
    Inputs,
    ModuleCall,
    NotRunnableError,
    TensorInfo,
    describe_inputs,
    give_shapes,
    guess_inputs,
    on_shapes,
    record,
    shapes_of,
    try_modes,
)
from torchspmd.parallel.sequence import SequenceParallel
from torchspmd.parallel.style import PlacedStyle
from torchspmd.trace.intercept import listen_alone
from torchspmd.trace.modules import ModuleTracker

# Batch and length that few numbers divide: view(batch, -1, heads, size) with the heads of
# one device would otherwise make tokens of heads on a rank, without an error.
_ODD = (5, 7)


def forecast(
    model: nn.Module,
    resolved: Resolved,
    example: Inputs | None,
    tokens: tuple[int, int],
) -> tuple[Ledger, list[str]]:
    """The ledger of one forward and backward of rank 0, and what it rests on.

    Args:
        model: The model, before the plan.
        resolved: The plan.
        example: Inputs of the model; None to make them from the number of tokens.
        tokens: Batch and sequence length.
    """
    assignments = resolved.assignments
    try:
        inputs = example if example is not None else guess_inputs(model, *tokens)
        run, notes = _run_model(model, resolved, inputs, is_example=example is not None)
    except NotRunnableError as error:
        tokens = tokens if example is None else _tokens_of(example) or tokens
        calls = list(_assumed_calls(assignments, *tokens))
        run = _run_layers(model, assignments, calls, resolved.mesh)
        notes = [
            f"The model does not run on shapes alone ({error}): every layer is taken to "
            f"be called once on {tokens[0]} x {tokens[1]} tokens."
        ]
    notes += _each(
        (a.path for a in assignments if a.path not in run.called),
        "was not called, so what it sends is not counted.",
    )
    notes += _each(run.unknown, "sends an amount that is not known, and not counted.")
    ledger = Ledger()
    # A table of modules is read from the input to the output: backward beside forward.
    places = {path: place for place, path in enumerate(run.called)}
    for event in sorted(
        run.events, key=lambda e: places.get(e.module.partition(".")[2], len(places))
    ):
        ledger.append(event)
    return ledger, notes


def _run_model(
    model: nn.Module, resolved: Resolved, inputs: Inputs, *, is_example: bool
) -> tuple["RankRun", list[str]]:
    """One run as rank 0, layer by layer where that fails; and notes on it.

    Raises:
        NotRunnableError: The whole model does not run on shapes either.
    """
    assignments, mesh = resolved.assignments, resolved.mesh
    odd = None
    if not is_example and all(map(_cuts_features, assignments)):
        odd = guess_inputs(model, *_ODD)

    def run_as_rank(copied: nn.Module) -> tuple[RankRun, NotRunnableError | None]:
        with _placed(copied, assignments, mesh) as rank:
            return rank.run(inputs), None if odd is None else rank.find_failure(odd)

    try:
        (run, failure), why_eval = try_modes(model, run_as_rank)
    except NotRunnableError as error:
        failure = error
        recording = record(model, inputs, [a.path for a in assignments])
        why_eval = recording.why_eval
        run = _run_layers(model, assignments, recording.module_calls, mesh)
    notes = [f"Shapes are those of a run on {describe_inputs(inputs)}."]
    if why_eval:
        notes.append(f"It was run in eval mode, as in training mode {why_eval}.")
    if failure is not None:
        notes.append(
            f"The forward fails on the shapes of one rank, {failure}. Take sizes and "
            "numbers of heads from the tensors, not from the config: -1 in a view; "
            "for a fused layer that it splits, split_whole=True."
        )
    return run, notes


def find_fixed_sizes(
    model: nn.Module, assignments: Sequence[Assignment], inputs: Inputs, num_ranks: int
) -> NotRunnableError | None:
    """Why the forward fails on the shapes of rank 0; None when it does not.

    ``x.view(batch, tokens, self.num_heads, head_dim)`` is right on one device and fails
    when a rank has some of the heads.
    """
    if num_ranks == 1:
        return None
    mesh = PlanMesh("tp", num_ranks, (("tp", num_ranks),))
    try:
        with _placed(copy_shapes(model), assignments, mesh) as rank:
            return rank.find_failure(inputs)
    except NotRunnableError as error:  # the styles do not fit so many ranks
        return error


def _cuts_features(assignment: Assignment) -> bool:
    """Whether any number of tokens will do: plain tensors are whole, or cut in features."""
    style = own_style(assignment.style)
    if isinstance(style, SequenceParallel):
        return style.use_local_output
    layouts = None if style is None else style.layouts(assignment.module)
    return (
        layouts is not None
        and layouts.local_output
        and all(
            x in (Replicate(), Shard(-1)) for x in (*layouts.inputs, layouts.output)
        )
    )


# ----------------------------------------------------------------------------
# One run of a copied model as rank 0 of an axis.


@dataclass(frozen=True, slots=True)
class RankRun:
    """What one rank did.

    Attributes:
        events: What it sent, in order.
        called: Paths of the modules with styles that were called, in order.
        unknown: Paths of those of which it is not known what they send.
    """

    events: list[CommEvent] = field(default_factory=list)
    called: dict[str, None] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


@contextlib.contextmanager
def _placed(
    copied: nn.Module, assignments: Sequence[Assignment], mesh: PlanMesh
) -> Iterator["_Rank"]:
    """A copied model with the styles of a plan on it, as rank 0 of an axis has it.

    Raises:
        NotRunnableError: A style could not be put on it.
    """
    with _torch.private_mesh(mesh.size) as device_mesh:
        axis = Axis(
            mesh=device_mesh,
            name=mesh.axis,
            size=mesh.size,
            rank=0,
            group=device_mesh.get_group().group_name,
        )
        own = [replace(a, module=copied.get_submodule(a.path)) for a in assignments]
        with on_shapes(copied):
            give_shapes(copied)
            for assignment in filter(_is_ours_or_torchs, own):
                place(assignment, axis, src_data_rank=None)
        yield _Rank(copied, own, axis)


class _Rank:
    """Runs a model that has its styles."""

    def __init__(
        self, model: nn.Module, assignments: Sequence[Assignment], axis: Axis
    ) -> None:
        self._model, self._assignments, self._axis = model, assignments, axis

    def run(self, inputs: Inputs, *, backward: bool = True) -> RankRun:
        """One forward, and backward; inputs are whole.

        Raises:
            NotRunnableError: It fails, or needs values.
        """
        unknown = [a.path for a in self._assignments if not _is_ours_or_torchs(a)]
        run = RankRun(unknown=unknown)
        with (
            torch.set_grad_enabled(backward),
            on_shapes(self._model),
            _recorded(self._axis, run.events),
        ):
            output = self._forward(_Given(inputs), run)
            if backward:
                _backward(output)
        return run

    def find_failure(self, inputs: Inputs) -> NotRunnableError | None:
        """Why the forward fails; None when it does not."""
        self._model.eval()
        try:
            self.run(inputs, backward=False)
        except NotRunnableError as error:
            return error
        return None

    def _forward(self, given: "_Given", run: RankRun) -> Any:
        """What the model returns; run again once it is known which inputs are parts."""
        with contextlib.ExitStack() as stack:
            for assignment in self._assignments:
                hook = assignment.module.register_forward_pre_hook(
                    _NoteCall(assignment, run, given), prepend=True, with_kwargs=True
                )
                stack.enter_context(hook)
            try:
                output = self._model(*given.args, **given.kwargs)
            except Exception:
                if not given.taken:
                    raise
            else:
                if not given.taken:
                    return output
            given.cut(self._axis.size)
            run.events.clear()
            return self._model(*given.args, **given.kwargs)


def _is_ours_or_torchs(assignment: Assignment) -> bool:
    """Whether a style is known to touch only the module that it is given."""
    style = assignment.style
    known = "torch.distributed.tensor.parallel."
    return isinstance(style, PlacedStyle) or type(style).__module__.startswith(known)


class _Given:
    """The inputs of a model: whole at first, then as rank 0 gets them.

    Attributes:
        args: Those by position.
        kwargs: Those by name.
        taken: The layout in which a style takes each input that is not whole, by ``id``.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.args, self.kwargs = shapes_of(inputs)
        self.taken: dict[int, Shard] = {}

    def note(self, value: Any, layout: Placement | None) -> None:
        """Note in which layout a style takes a tensor, if that is one of the inputs."""
        inputs = (*self.args, *self.kwargs.values())
        if isinstance(layout, Shard) and any(value is given for given in inputs):
            self.taken[id(value)] = layout

    def cut(self, num_ranks: int) -> None:
        """Cut what was taken as one rank's part."""
        self.args = tuple(self._cut(value, num_ranks) for value in self.args)
        self.kwargs = {n: self._cut(v, num_ranks) for n, v in self.kwargs.items()}
        self.taken.clear()

    def _cut(self, value: Any, num_ranks: int) -> Any:
        if id(value) not in self.taken:
            return value
        layout = positive_dim(self.taken[id(value)], value.ndim)
        assert isinstance(layout, Shard)
        size = shard_size(value.size(layout.dim), num_ranks, 0)
        part = value.detach().narrow(layout.dim, 0, size).clone()
        return part.requires_grad_(value.requires_grad)


@dataclass(frozen=True, slots=True)
class _NoteCall:
    """Hook before all others of a module with a style: notes its call and its inputs."""

    assignment: Assignment
    run: RankRun
    given: _Given

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.run.called[self.assignment.path] = None
        by_place, by_name = taken_layouts(own_style(self.assignment.style), module)
        for value, layout in zip(args, by_place, strict=False):
            self.given.note(value, layout)
        for name, value in kwargs.items():
            self.given.note(value, by_name.get(name))


def _backward(output: Any) -> None:
    """A gradient for everything that a model returns."""
    made = [t for t in _torch.leaves_of(torch.Tensor, output) if t.requires_grad]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in made]
    if local:
        torch.autograd.backward([tensor.sum() for tensor in local])


@contextlib.contextmanager
def _recorded(axis: Axis, events: list[CommEvent]) -> Iterator[None]:
    """Record what is sent over the axis, and hide it from other recordings."""
    group = Group(name="predicted", ranks=tuple(range(axis.size)), axis=axis.name)
    tracker = ModuleTracker()

    def note(operator: Operator, arguments: Mapping[str, Any]) -> None:
        if arguments.get("group_name") == axis.group:
            module, phase = tracker.locate() or (GLOBAL, Phase.FORWARD)
            size = measure(operator, arguments, axis.size)
            kind, op = operator.kind, operator.counted_as
            events.append(CommEvent(kind, op, *size, group, phase, module))

    tracker.start()
    try:
        with listen_alone(note):
            yield
    finally:
        tracker.stop()


# ----------------------------------------------------------------------------
# Layer by layer, where the whole does not run.


def _run_layers(
    model: nn.Module,
    assignments: Sequence[Assignment],
    calls: Sequence[ModuleCall],
    mesh: PlanMesh,
) -> RankRun:
    """Each call of a module with a style by itself, on inputs of the whole shapes."""
    run = RankRun()
    by_path = {assignment.path: assignment for assignment in assignments}
    for call in calls:
        alone = replace(by_path[call.path], path="")
        run.called[call.path] = None
        try:
            with _placed(copy_shapes(alone.module), [alone], mesh) as rank:
                done = rank.run(tuple(map(_empty, call.inputs)))
        except NotRunnableError:
            run.unknown.append(call.path)
            continue
        run.unknown.extend(call.path for _ in done.unknown)
        name = f"{type(model).__name__}.{call.path}" if call.path else ""
        run.events.extend(e._replace(module=name or e.module) for e in done.events)
    return run


def _empty(info: TensorInfo | None) -> torch.Tensor | None:
    if info is None:
        return None
    made = torch.empty(info.shape, dtype=info.dtype, device="meta")
    return made.requires_grad_(info.needs_grad)


def _tokens_of(inputs: Inputs) -> tuple[int, int] | None:
    """Batch and sequence length of the first input that has both."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim > 1:
            return value.size(0), value.size(1)
    return None


def _each(paths: Iterable[str], what: str) -> list[str]:
    return [f"{name or 'the model'} {what}" for name in fold(list(paths))]


def _assumed_calls(
    assignments: Sequence[Assignment], batch: int, seq: int
) -> Iterable[ModuleCall]:
    """One call of each layer whose shapes follow from the layer itself."""
    for number, assignment in enumerate(assignments):
        module = assignment.module
        form = linear_form(module)
        if form is not None:
            sizes, dtype = form[:2], module.get_parameter("weight").dtype
            given = TensorInfo((batch, seq, sizes[0]), dtype, True, 2 * number)
        elif isinstance(module, nn.Embedding):
            sizes, dtype = (1, module.embedding_dim), module.weight.dtype
            given = TensorInfo((batch, seq), torch.long, False, 2 * number)
        elif (
            isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and module.weight is not None
        ):
            sizes, dtype = (1, module.normalized_shape[-1]), module.weight.dtype
            given = TensorInfo((batch, seq, sizes[1]), dtype, True, 2 * number)
        else:
            continue
        output = TensorInfo((batch, seq, sizes[1]), dtype, True, 2 * number + 1)
        yield ModuleCall(assignment.path, (given,), {}, (output,))
