"""Compilation in a rehearsal: graphs run operator by operator, in numbered regions.

What a compiled region allocates and launches depends on a compiler that is not run here.
Its operators are recorded one by one, with the number of their region.

A step of ``torchspmd.compile`` is captured and transformed as it is on a GPU; what it then
runs is recorded like any other code. Nothing that needs values or other ranks is done.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from torchspmd import _torch
from torchspmd.rehearse.recorder import Recorder
from torchspmd.step import pipeline
from torchspmd.step.compiled import CompiledStep
from torchspmd.step.deferred import forget_pending
from torchspmd.step.graph import inductor
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.pieces import Piece, find_steps
from torchspmd.step.lower import backends, deferred_in_place
from torchspmd.step.lower.cuda_graph import check_cuda_graph
from torchspmd.step.shadow.check import Plan

__all__ = ["compilation_by_operator"]

_NOTE = (
    "torch.compile: compiled regions run operator by operator; what a compiler would fuse "
    "away or compute again in backward is estimated, and left out of the memory"
)
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
_CUDA_GRAPH = (
    "torchspmd.compile(backend='cudagraph'): every step counts as a replay, which costs "
    "the host nothing; the buffers for its inputs and results, and that its memory is kept "
    "between steps, are not counted"
)


@contextlib.contextmanager
def compilation_by_operator(
    recorder: Recorder, cost: Callable[[], CostModel]
) -> Iterator[None]:
    """Nothing is compiled inside; calls of what would be are numbered.

    Args:
        recorder: What is told of compiled regions and steps.
        cost: Gives what passes choose by that ask for measured rates.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            *_torch_compile(recorder),
            *_calls_of_steps(recorder),
            *_without_values(recorder, cost),
            *_backends(recorder),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        # The run ends after some step, which is no fault of the script's.
        stack.callback(forget_pending)
        yield


def _torch_compile(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer = recorder.region
            if outer is not None:  # a compiled function that a compiled one calls
                return function(*args, **kwargs)
            recorder.begin_region()
            try:
                return function(*args, **kwargs)
            finally:
                recorder.end_region()

        return call

    def compile(model: Any = None, **options: Any) -> Any:
        recorder.values.note(_NOTE)
        if model is None:
            return lambda function: compile(function, **options)
        if isinstance(model, nn.Module):
            model.forward = watched(model.forward)
            return model
        return watched(model)

    def compile_in_place(module: nn.Module, *args: Any, **options: Any) -> None:
        compile(module)

    yield torch, "compile", compile
    yield nn.Module, "compile", compile_in_place


def _calls_of_steps(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    plain_call, plain_run = CompiledStep.__call__, CompiledStep._run
    plain_find = CompiledStep._find

    def call(step: CompiledStep, *args: Any, **kwargs: Any) -> Any:
        recorder.begin_program()
        try:
            return plain_call(step, *args, **kwargs)
        finally:
            recorder.end_program()

    def find(step: CompiledStep, *args: Any) -> Any:
        recorder.begin_step()
        return plain_find(step, *args)

    def run(step: CompiledStep, program: Any, inventory: Any, last: bool) -> Any:
        if program.first_run_seconds is None:
            models = [module for _, module in inventory.modules]
            recorder.name_program(models, [each for _, each in inventory.optimizers])
        result = plain_run(step, program, inventory, last)
        if program.updated:
            recorder.end_step()
        return result

    yield CompiledStep, "__call__", call
    yield CompiledStep, "_find", find
    yield CompiledStep, "_run", run


def _without_values(
    recorder: Recorder, cost: Callable[[], CostModel]
) -> Iterator[tuple[Any, str, Any]]:
    note = recorder.values.note

    def no_shadow(shadow: int | None, every: int | None) -> Plan:
        if shadow != 0:
            note(_SHADOW)
        return Plan(0)

    def no_verifier(title: str, graph: Any, flat: Any, asked: object) -> None:
        if asked is not None:
            note(_VERIFY)

    def known_cost(*args: Any, **kwargs: Any) -> tuple[CostModel, tuple[str, ...]]:
        note(_COST)
        return cost(), ()

    yield Plan, "of", no_shadow
    yield pipeline, "_make_verifier", no_verifier
    yield pipeline, "measure_graph", known_cost


def _backends(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    note = recorder.values.note

    def lower(graph: fx.GraphModule, compiled: object = None) -> tuple[Any, str]:
        note(_INDUCTOR)
        inductor.check_compilable(graph)
        return _run_in_pieces(recorder, graph), "Inductor: not run in a rehearsal"

    def replay(graph: fx.GraphModule) -> Callable[..., Any]:
        note(_CUDA_GRAPH)
        check_cuda_graph(graph)
        return _run_as_replay(recorder, graph)

    yield _torch, "start_kernel_compilers", lambda: None
    for module in (inductor, backends, deferred_in_place):
        yield module, "lower", lower
    yield backends, "CudaGraphRun", replay


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
