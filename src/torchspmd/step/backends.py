"""How a program's graph is run: as generated Python, or compiled ahead by Inductor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.iteration import IterGraphModule
from torchspmd.step.transformation import GraphModuleTransformation

BACKENDS = ("graph", "inductor")


def needs_fixed_numbers(backend: str, transformation: object) -> bool:
    """Whether hyper-parameters become constants: Inductor takes tensors only."""
    if backend == "inductor":
        return True
    return (
        isinstance(transformation, GraphModuleTransformation)
        and transformation.enable_inductor
    )


def prepare(
    graph: fx.GraphModule,
    backend: str,
    transformation: Callable[[fx.GraphModule], Any] | None,
) -> tuple[Callable[..., Any], fx.GraphModule]:
    """What a program calls, and the graph behind it as far as it can be seen.

    A transformation may return any callable; then the captured graph is what is shown.
    """
    run: Any = graph
    if transformation is not None:
        with torch.no_grad():
            run = transformation(graph)
        if not callable(run):
            raise CaptureError(
                f"compile: gm_transformation returned {type(run).__name__}, which cannot "
                "be called. Return the graph module, or a callable on its inputs."
            )
    if backend == "inductor":
        if run is not graph and not isinstance(run, fx.GraphModule):
            raise CaptureError(
                "compile(backend='inductor') needs a gm_transformation that returns an "
                f"fx.GraphModule, not {type(run).__name__}. Pass enable_inductor=True to "
                "GraphModuleTransformation instead."
            )
        return _WithoutLastIteration(lower(run)), run
    if isinstance(run, IterGraphModule):
        return run, run.main_gm
    final = run if isinstance(run, fx.GraphModule) else graph
    return _WithoutLastIteration(run), final


def lower(graph: fx.GraphModule) -> Callable[..., Any]:
    """A graph compiled by Inductor."""
    if _torch.has_symbols(graph):
        raise CaptureError(
            "the Inductor backend cannot compile a graph that reads numbers from tensors: "
            "the optimizer reads its step counter on the host. Use an optimizer with "
            "fused=True or capturable=True, or backend='graph'."
        )
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    return _torch.compile_with_inductor(graph, inputs)


class _WithoutLastIteration:
    """A graph in which no iteration differs from another."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *flat: Any, last_iter: bool = False) -> Any:
        return self._run(*flat)
