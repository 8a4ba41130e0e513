"""torch.compile and CUDA graphs: what runs without calling operators."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._guards import TracingContext

# How many captures of whole steps are under way. Not by thread: autograd traces the
# backward of tensors on a GPU in a thread of its own.
_captures: list[None] = []


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """A step is captured inside: what it calls is written into a graph and does not run."""
    _captures.append(None)
    try:
        yield
    finally:
        _captures.pop()


def is_tracing_for_compile() -> bool:
    """Whether a compiler is tracing, so that nothing really runs."""
    return bool(_captures) or TracingContext.try_get() is not None


def load_compiler() -> None:
    """Import torch.compile's front end, which remembers how modules are called.

    It is imported by the first optimizer or DTensor anyway; imported while module calls
    are observed, it would take the observer for the original.
    """
    import torch._dynamo  # noqa: F401


def start_kernel_compilers() -> None:
    """Start the processes that compile kernels for a GPU: they take a few seconds.

    Until they are up, kernels are compiled one after another in this process.
    """
    from torch._inductor import async_compile

    async_compile.maybe_warm_pool()


def keep_from_compiler(function: Callable[..., Any]) -> None:
    """Have torch.compile run a function as it is, but look at what it calls.

    Costs nothing per call, where ``torch.compiler.disable`` wraps the function.
    """
    from torch._dynamo import eval_frame

    eval_frame.skip_code(function.__code__)


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether calling a module runs code made by torch.compile."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def splits_products() -> bool:
    """Whether compiled code splits products, to run them beside their collectives.

    That is asynchronous tensor parallelism; a script sets it in Inductor's configuration.
    """
    config = sys.modules.get("torch._inductor.config")
    return bool(getattr(config, "_micro_pipeline_tp", False))


def size_hint(size: int | torch.SymInt) -> int:
    """A size as a number; of a symbol, the value it was traced with, without a guard."""
    if isinstance(size, torch.SymInt) and size.node.has_hint():
        return int(size.node.hint)
    return int(size)


def number_hint(number: Any) -> Any:
    """A number as it is; of a symbol, the value it was traced with, without a guard."""
    is_symbol = isinstance(number, (torch.SymInt, torch.SymFloat))
    return number.node.hint if is_symbol else number


_replay_callbacks: list[Callable[[], None]] = []


def on_graph_replay(callback: Callable[[], None]) -> Callable[[], None]:
    """Call back at each replay of a CUDA graph; return the function that undoes it.

    A replay launches kernels without calling operators, so nothing else can see it.
    """
    graph_class: Any = torch.cuda.CUDAGraph
    if not _replay_callbacks:
        replay = graph_class.replay

        def observed_replay(graph: Any) -> None:
            for each in _replay_callbacks:
                each()
            replay(graph)

        observed_replay.original = replay  # type: ignore[attr-defined]
        graph_class.replay = observed_replay
    _replay_callbacks.append(callback)

    def undo() -> None:
        _replay_callbacks.remove(callback)
        if not _replay_callbacks:
            graph_class.replay = graph_class.replay.original

    return undo


def tell_graph_replay() -> None:
    """Run the callbacks of ``on_graph_replay``, for a graph that is not torch's."""
    for each in _replay_callbacks:
        each()


@contextlib.contextmanager
def cuda_graphs_as(
    graph_class: type[Any],
    new_pool: Callable[[], object],
    is_capturing: Callable[[], bool],
) -> Iterator[None]:
    """Let ``torch.cuda.graph`` and ``make_graphed_callables`` use another graph.

    Args:
        graph_class: Stands for ``torch.cuda.CUDAGraph``.
        new_pool: Gives the handle of a new pool of memory.
        is_capturing: Whether the current stream is being captured.
    """
    names = {
        "CUDAGraph": graph_class,
        "graph_pool_handle": new_pool,
        "is_current_stream_capturing": is_capturing,
    }
    with contextlib.ExitStack() as stack:
        for owner in (torch.cuda, torch.cuda.graphs):
            for name, value in names.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        # The stream of a capture that names none, kept for the whole process.
        stack.enter_context(
            mock.patch.object(torch.cuda.graph, "default_capture_stream", None)
        )
        stack.enter_context(
            mock.patch.object(torch._C, "_host_emptyCache", lambda: None, create=True)
        )
        yield


def call_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run the hooks of all optimizers for a step that no ``step()`` makes."""
    from torch.optim import optimizer as of

    for before in tuple(of._global_optimizer_pre_hooks.values()):
        before(optimizer, (), {})
    for after in tuple(of._global_optimizer_post_hooks.values()):
        after(optimizer, (), {})
