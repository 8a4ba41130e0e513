"""A program as a CUDA graph: captured once, replayed at each step."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.graph.memory import ROLE_KEY

_WARM_UP = 2  # steps that run as they are, so that libraries set themselves up
_PASSING = ("input", "gradient")  # other tensors at each call: copied into a buffer


@final
class CudaGraphRun:
    """Runs a graph a few times on a stream of its own, then captures and replays it.

    States keep their memory from step to step, so the CUDA graph reads and writes the
    user's own tensors; where one was replaced by another, it is captured again. Inputs and
    gradients are copied into buffers of their own, results are copied out.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        check_cuda_graph(graph)
        self._graph = graph
        nodes = graph.graph.find_nodes(op="placeholder")
        roles = [node.meta.get(ROLE_KEY) for node in nodes]
        self._is_state = [role is not None and role not in _PASSING for role in roles]
        self._num_warm = 0
        self._captured: _Replay | None = None

    def __call__(self, *flat: Any) -> Any:
        """Make one step."""
        if self._captured is not None and not self._captured.fits(flat):
            self._captured = None
        if self._captured is None:
            if self._num_warm < _WARM_UP:
                self._num_warm += 1
                return _run_aside(self._graph, flat)
            self._captured = _Replay(self._graph, self._is_state, flat)
        return self._captured.run(flat)


def check_cuda_graph(graph: fx.GraphModule) -> None:
    """Refuse what a CUDA graph cannot do."""
    if not torch.cuda.is_available():
        raise CaptureError(
            "compile(backend='cudagraph') needs a CUDA device, and there is none: use "
            "backend='graph' or 'inductor'."
        )
    if _torch.has_symbols(graph):
        raise CaptureError(
            "compile(backend='cudagraph'): the optimizer reads its step counter on the "
            "host, which a CUDA graph cannot do: use fused=True or capturable=True."
        )
    on_host = [
        str(node.meta.get("torchspmd_name", node.name))
        for node in graph.graph.find_nodes(op="placeholder")
        if ROLE_KEY in node.meta and node.meta["val"].device.type != "cuda"
    ]
    if on_host:
        raise CaptureError(
            f"compile(backend='cudagraph'): {on_host[0]} and {len(on_host) - 1} more "
            "tensors are not on a CUDA device: move them there before the step."
        )


def _run_aside(run: Callable[..., Any], flat: tuple[Any, ...]) -> Any:
    """One real step on a stream of its own, as a capture wants it before."""
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        values = run(*flat)
    here.wait_stream(aside)
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            value.record_stream(here)
    return values


class _Replay:
    """One captured CUDA graph and the tensors that it was captured with."""

    def __init__(
        self, run: Callable[..., Any], is_state: list[bool], flat: tuple[Any, ...]
    ) -> None:
        self._is_state = is_state
        self._inputs = [
            value if kept else _buffer(value)
            for value, kept in zip(flat, is_state, strict=True)
        ]
        self._addresses = self._addresses_of(flat)
        self._graph = torch.cuda.CUDAGraph()
        # NCCL's own threads may call CUDA while this one captures.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = run(*self._inputs)
        places = {id(value): n for n, value in enumerate(self._inputs)}
        self._places = [places.get(id(value), -1) for value in self._outputs]

    def fits(self, flat: tuple[Any, ...]) -> bool:
        """Whether all states are still where they were."""
        return self._addresses_of(flat) == self._addresses

    def run(self, flat: tuple[Any, ...]) -> list[Any]:
        """Copy the inputs in, replay, copy the results out."""
        for value, buffer, kept in zip(flat, self._inputs, self._is_state, strict=True):
            if not kept and isinstance(buffer, torch.Tensor):
                buffer.copy_(value, non_blocking=True)
        self._graph.replay()
        return [
            flat[place] if place >= 0 and self._is_state[place] else _copy_out(value)
            for value, place in zip(self._outputs, self._places, strict=True)
        ]

    def _addresses_of(self, flat: tuple[Any, ...]) -> list[int]:
        pairs = zip(flat, self._is_state, strict=True)
        return [value.data_ptr() for value, kept in pairs if kept]


def _buffer(value: Any) -> Any:
    """Memory on the device that stays where it is.

    Also for a rate on the host: a kernel would take it as a constant, and every replay
    would use the first one. Fused optimizers read such a rate in single precision.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_cuda:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        ).copy_(value)
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    return value.to("cuda", dtype)


def _copy_out(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
