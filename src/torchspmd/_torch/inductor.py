"""Graphs compiled ahead by torch's own compiler."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx


def compile_with_inductor(
    graph: fx.GraphModule, inputs: list[Any]
) -> tuple[Callable[[list[Any]], Sequence[Any]], str]:
    """The graph compiled ahead by torch's own compiler, and what its cache gave.

    What is returned takes a list of the inputs and empties it. A cache that cannot be used
    costs time, and nothing else.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    inputs = _distinct(inputs)
    before = dict(counters["inductor"])
    try:
        made = _compile_boxed(graph, inputs)
    except Exception as error:
        # It may be a broken file in the cache: once more, without it.
        try:
            with fresh_cache():
                made = _compile_boxed(graph, inputs)
        except Exception:
            raise error from None
        return made, "its cache could not be used, compiled without it"
    hits, misses = (
        counters["inductor"][key] - before.get(key, 0)
        for key in ("fxgraph_cache_hit", "fxgraph_cache_miss")
    )
    if hits:
        return made, "compiled code from its cache"
    return (
        made,
        "compiled anew, kept in its cache" if misses else "compiled, not cached",
    )


# Operations that Inductor computes in one kernel before it stores a value in between; its
# own limit for a GPU is 30. A loss with its gradient has 32, and what is stored then is as
# large as the logits, in float32.
_MOST_INLINED = 60


def _compile_boxed(
    graph: fx.GraphModule, inputs: list[Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    """Inductor's own code without the wrapper around it, where that would do nothing.

    The wrapper gives outputs that are views of inputs their history. It holds all inputs
    until the end, and takes longer than a small kernel.
    """
    from torch._inductor import compile_fx, config

    (output,) = graph.graph.find_nodes(op="output")
    found: list[Callable[[list[Any]], Sequence[Any]]] = []

    def compile_inner(inner: fx.GraphModule, examples: Any, **options: Any) -> Any:
        made: Any = compile_fx.compile_fx_inner(inner, examples, **options)
        if _gives_the_same(inner, len(inputs), len(output.args[0])):
            found.append(made)
        return made

    inlining = config.patch(realize_opcount_threshold=_MOST_INLINED)
    with torch.no_grad(), inlining, _without_numbers(inputs):
        wrapped: Any = compile_fx.compile_fx(graph, inputs, inner_compile=compile_inner)
    if found:
        return found[-1]

    def run(args: list[Any]) -> Sequence[Any]:
        taken = tuple(args)
        args.clear()
        return wrapped(*taken)

    return run


@contextlib.contextmanager
def _without_numbers(inputs: list[Any]) -> Iterator[None]:
    """Inside, the fake modes of the examples have empty shape environments.

    The compiler would make constants of all floats in the environment of its examples, also
    of those that are not inputs of the graph.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    modes = {value.fake_mode for value in inputs if isinstance(value, FakeTensor)}
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mock.patch.object(mode, "shape_env", ShapeEnv()))
        yield


def _gives_the_same(inner: fx.GraphModule, num_inputs: int, num_outputs: int) -> bool:
    """Whether Inductor's own graph has the inputs and outputs of the original one."""
    inputs = inner.graph.find_nodes(op="placeholder")
    (output,) = inner.graph.find_nodes(op="output")
    values = [getattr(node, "meta", {}).get("val") for node in output.args[0]]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    memory = {
        value.untyped_storage()._cdata
        for value in (node.meta.get("val") for node in inputs)
        if isinstance(value, torch.Tensor)
    }
    return (
        len(inputs) == num_inputs
        and len(values) == len(tensors) == num_outputs
        and not any(each.untyped_storage()._cdata in memory for each in tensors)
    )


def _distinct(inputs: list[Any]) -> list[Any]:
    """Example inputs none of which share memory.

    The compiler reads one input instead of two wherever their examples are one tensor: a
    learning rate and the one that the step before left would become the same number.
    """
    seen: set[int] = set()

    def apart(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()._cdata
        if storage in seen:
            return value.new_empty_strided(value.shape, value.stride())
        seen.add(storage)
        return value

    return [apart(value) for value in inputs]
