"""What compiled steps ask of the machine they run on: the seam for a rehearsal of them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

from torchspmd import _torch
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.inductor import CompiledPieces, lower
from torchspmd.step.lower.cuda_graph import CudaGraphRun
from torchspmd.step.measure.clock import Stopwatch
from torchspmd.step.measure.operators import measure_graph
from torchspmd.step.program import Program
from torchspmd.step.rank_agreement import Agreement
from torchspmd.step.shadow.check import ShadowPlan
from torchspmd.step.virtual.verify import Verification


class Runtime:
    """Measures, compares, compiles and runs; a rehearsal does these otherwise."""

    def shadow_plan(self, asked: ShadowPlan) -> ShadowPlan:
        """Which calls are also made eagerly."""
        return asked

    def verification(self, asked: Verification | None) -> Verification | None:
        """How graphs are compared; None to compare nothing."""
        return asked

    def measure(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        ranks: Agreement,
        before: CostModel | None,
        *,
        fuses: bool,
    ) -> tuple[CostModel, tuple[str, ...]]:
        """What passes choose by that ask for measured rates, and lines about it."""
        return measure_graph(graph, inputs, ranks, before, fuses=fuses)

    def start_compilers(self) -> None:
        """A graph will be compiled with Inductor: get ready while it is captured."""
        _torch.start_kernel_compilers()

    def compile_graph(
        self, graph: fx.GraphModule, compiled: CompiledPieces
    ) -> tuple[Callable[..., Any], str]:
        """A graph that Inductor has compiled, and a line about it."""
        return lower(graph, compiled)

    def replay_graph(self, graph: fx.GraphModule) -> Callable[..., Any]:
        """A graph that is launched once and replayed from then on."""
        return CudaGraphRun(graph)

    def why_untimed(self) -> str:
        """Why calls cannot be timed here; empty where they can."""
        return ""

    def stopwatch(self, on_stream: bool) -> Stopwatch:
        """What calls are timed with, where two backends take turns."""
        return Stopwatch(on_stream)

    def calling(self) -> AbstractContextManager[None]:
        """Around each call of a compiled step."""
        return contextlib.nullcontext()

    def running(
        self, program: Program, inventory: Inventory
    ) -> AbstractContextManager[None]:
        """Around the run of the program that serves the call."""
        return contextlib.nullcontext()


_runtimes = [Runtime()]


def current_runtime() -> Runtime:
    """What compiled steps of this process run on now."""
    return _runtimes[-1]


@contextlib.contextmanager
def using_runtime(runtime: Runtime) -> Iterator[None]:
    """Compiled steps run on another runtime inside of a ``with`` block.

    No argument could carry it: a script that is rehearsed calls ``compile`` itself.
    """
    _runtimes.append(runtime)
    try:
        yield
    finally:
        _runtimes.remove(runtime)
