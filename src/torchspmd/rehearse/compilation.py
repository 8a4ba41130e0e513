"""Compilation in a rehearsal: graphs run operator by operator, in numbered regions.

What a compiled region allocates and launches depends on a compiler that is not run here.
Its operators are recorded one by one, with the number of their region.

A step of ``torchspmd.compile`` is captured and transformed as it is on a GPU; what it then
runs is recorded like any other code. Nothing that needs values or other ranks is done.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from torchspmd import _torch
from torchspmd.comm import Group
from torchspmd.rehearse.recorder import Recorder
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.graph import inductor
from torchspmd.step.graph.collectives import axes_of
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.inductor import CompiledPieces
from torchspmd.step.graph.pieces import Piece, find_steps
from torchspmd.step.lower.cuda_graph import check_cuda_graph
from torchspmd.step.pending import forget_pending
from torchspmd.step.program import Program
from torchspmd.step.runtime import Runtime, using_runtime
from torchspmd.step.shadow.check import ShadowPlan
from torchspmd.step.virtual.verify import Verification

__all__ = ["compilation_by_operator"]

_NOTE = (
    "torch.compile: compiled regions run operator by operator; what a compiler would fuse "
    "away or compute again in backward is estimated, and left out of the memory"
)
_REPLAYED = (
    "torch.compile(mode='reduce-overhead' or 'max-autotune'): each region counts as one "
    "replay of a CUDA graph; copies of its inputs, and that its memory is kept, are not "
    "counted"
)
_SPLIT = (
    "torch._inductor.config._micro_pipeline_tp: compiled code would split products and run "
    "them beside the collectives of tensor parallelism; here one follows the other"
)
_GRAPHS = frozenset({"reduce-overhead", "max-autotune"})  # modes
_SHADOW = (
    "torchspmd.compile: no call is made eagerly too (shadow=0): the first steps of a run "
    "that does are slower and need more memory"
)
_VERIFY = "torchspmd.compile(verify=...): graphs are not compared, for want of values"
_COST = (
    "torchspmd.compile(cost='measure'): nothing can be measured here; the passes choose by "
    "the rates of the GPU's file"
)
_INDUCTOR = (
    "torchspmd.compile(backend='inductor'): pieces run operator by operator; what Inductor "
    "would fuse away in each is estimated, and left out of the memory"
)
_AUTO = (
    "torchspmd.compile(backend='auto'): backends cannot be timed here; the graph is run, "
    "where a GPU may take Inductor"
)
_CUDA_GRAPH = (
    "torchspmd.compile(backend='cudagraph'): every step counts as a replay, which costs "
    "the host nothing; the buffers for its inputs and results, and that its memory is kept "
    "between steps, are not counted"
)


@contextlib.contextmanager
def compilation_by_operator(
    recorder: Recorder, cost: Callable[[Mapping[str, Group]], CostModel]
) -> Iterator[None]:
    """Nothing is compiled inside; calls of what would be are numbered.

    Args:
        recorder: What is told of compiled regions and steps.
        cost: Gives what passes choose by that ask for measured rates.
    """
    runtime = _Rehearsed(recorder, cost)
    zeros: list[torch.Tensor] = []  # of the region whose backward runs; see _Results
    with contextlib.ExitStack() as stack:
        for owner, name, value in _torch_compile(recorder, zeros):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_torch.after_each_backward(zeros.clear))
        # An IterGraphModule that a script runs by itself belongs to no compiled step.
        stack.enter_context(mock.patch.object(inductor, "lower", runtime.compile_graph))
        stack.enter_context(using_runtime(runtime))
        # The run ends after some step, which is no fault of the script's.
        stack.callback(forget_pending)
        yield


class _Results(torch.autograd.Function):
    """The results of a compiled region come from one node of autograd.

    So its backward begins when the gradients of all of them are there; one that the script
    made no use of, such as logits beside a loss, gets zeros, which are in memory.
    """

    @staticmethod
    def forward(
        ctx: Any, zeros: list[torch.Tensor], *results: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.zeros = zeros
        ctx.likes = [(each.shape, each.dtype, each.device) for each in results]
        return tuple(each.detach() for each in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.zeros.clear()
        full = [
            torch.zeros(shape, dtype=dtype, device=device) if given is None else given
            for given, (shape, dtype, device) in zip(gradients, ctx.likes, strict=True)
        ]
        # Compiled code only reads them: without this, gradients are added into them.
        ctx.zeros += [
            gradient
            for gradient, given in zip(full, gradients, strict=True)
            if given is None
        ]
        return None, *full


def _from_one_node(results: Any, zeros: list[torch.Tensor]) -> Any:
    """Results of a region, as backward knows them; DTensors stay as they are."""
    leaves, structure = _torch.flatten_tree(results)
    places = [
        place
        for place, leaf in enumerate(leaves)
        if _torch.is_fake_tensor(leaf) and leaf.grad_fn is not None
    ]
    if len(places) < 2:  # backward that gets here comes with its gradient
        return results
    joined = _Results.apply(zeros, *(leaves[place] for place in places))
    for place, result in zip(places, joined, strict=True):
        leaves[place] = result
    return _torch.unflatten_tree(leaves, structure)


def _torch_compile(
    recorder: Recorder, zeros: list[torch.Tensor]
) -> Iterator[tuple[Any, str, Any]]:
    def watched(function: Callable[..., Any], replays: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer = recorder.region
            if outer is not None:  # a compiled function that a compiled one calls
                return function(*args, **kwargs)
            recorder.begin_region(replays=replays)
            try:
                results = function(*args, **kwargs)
                recorder.mark_returned(results)
            finally:
                recorder.end_region()
            return _from_one_node(results, zeros)

        return call

    def compile(model: Any = None, **options: Any) -> Any:
        recorder.values.note(_NOTE)
        if _torch.splits_products():
            recorder.values.note(_SPLIT)
        if model is None:
            return lambda function: compile(function, **options)
        replays = options.get("mode") in _GRAPHS
        if replays:
            recorder.values.note(_REPLAYED)
        if isinstance(model, nn.Module):
            model.forward = watched(model.forward, replays)
            return model
        return watched(model, replays)

    def compile_in_place(module: nn.Module, *args: Any, **options: Any) -> None:
        compile(module, **options)

    yield torch, "compile", compile
    yield nn.Module, "compile", compile_in_place


class _Rehearsed(Runtime):
    """Compiled steps are captured as on a GPU, and run operator by operator."""

    def __init__(
        self, recorder: Recorder, cost: Callable[[Mapping[str, Group]], CostModel]
    ) -> None:
        self._recorder, self._cost = recorder, cost

    def shadow_plan(self, asked: ShadowPlan) -> ShadowPlan:
        if asked.calls:
            self._recorder.values.note(_SHADOW)
        return ShadowPlan(0)

    def verification(self, asked: Verification | None) -> None:
        if asked is not None:
            self._recorder.values.note(_VERIFY)

    def measure(
        self, graph: fx.GraphModule, *args: Any, **kwargs: Any
    ) -> tuple[CostModel, tuple[str, ...]]:
        self._recorder.values.note(_COST)
        return self._cost(axes_of(graph.graph)), ()

    def start_compilers(self) -> None:
        """Nothing will be compiled."""

    def compile_graph(
        self, graph: fx.GraphModule, compiled: CompiledPieces | None = None
    ) -> tuple[Callable[..., Any], str]:
        self._recorder.values.note(_INDUCTOR)
        inductor.check_compilable(graph)
        return _run_in_pieces(self._recorder, graph), "Inductor: not run in a rehearsal"

    def why_untimed(self) -> str:
        self._recorder.values.note(_AUTO)
        return "this is a rehearsal"

    def replay_graph(self, graph: fx.GraphModule) -> Callable[..., Any]:
        self._recorder.values.note(_CUDA_GRAPH)
        check_cuda_graph(graph)
        return _run_as_replay(self._recorder, graph)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        self._recorder.begin_program()
        self._recorder.begin_step()
        try:
            yield
        finally:
            self._recorder.end_program()

    @contextlib.contextmanager
    def running(self, program: Program, inventory: Inventory) -> Iterator[None]:
        if program.first_run_seconds is None:
            models = [module for _, module in inventory.modules]
            optimizers = [each for _, each in inventory.optimizers]
            self._recorder.name_program(models, optimizers)
        yield
        if program.updated:
            self._recorder.end_step(*(each for _, each in inventory.optimizers))


def _run_in_pieces(recorder: Recorder, graph: fx.GraphModule) -> Callable[..., Any]:
    """Run a graph so that each operator is in the region of the piece it belongs to."""
    pieces = [step for step in find_steps(graph) if isinstance(step, Piece)]

    def run(*inputs: Any) -> Any:
        numbers = recorder.new_regions(len(pieces))
        recorder.pieces = {
            node: number
            for number, piece in zip(numbers, pieces, strict=True)
            for node in piece.nodes
        }
        try:
            return graph.forward(*inputs)
        finally:
            recorder.pieces = {}

    return run


def _run_as_replay(recorder: Recorder, graph: fx.GraphModule) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        recorder.replays = True
        try:
            return graph.forward(*inputs)
        finally:
            recorder.replays = False

    return run
