"""CUDA graphs in a rehearsal: what is captured once is done again by each replay.

Operators run while a graph is captured, so that their results have shapes, and are written
down like any others; the step in which that happens is no steady one. A replay repeats the
work of the capture: operators, communications, what streams wait for, and steps of
optimizers. It allocates nothing: the graph keeps the memory of its capture.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import TypeAlias

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchspmd import _torch
from torchspmd.errors import UsageError
from torchspmd.rehearse.recorder import Recorder
from torchspmd.rehearse.recording import (
    Comm,
    Event,
    EventRecord,
    EventWait,
    Mark,
    MarkKind,
    Op,
    StreamWait,
    Wait,
)
from torchspmd.trace.modules import call_followers, follow, unfollow

__all__ = ["cuda_graphs"]

_WORK = (Op, Comm, Wait, EventRecord, EventWait, StreamWait)
# An event to repeat, or whom to tell that a module is called or an optimizer steps.
_Part: TypeAlias = Event | Callable[[], None]


@contextlib.contextmanager
def cuda_graphs(recorder: Recorder) -> Iterator[None]:
    """Inside, ``torch.cuda.CUDAGraph`` and what is built on it capture and replay."""
    pools = count(1)
    graph: type[_Graph] = type(
        "CUDAGraph", (_Graph,), {"recorder": recorder, "pools": pools}
    )
    with _torch.cuda_graphs_as(
        graph, lambda: (next(pools), 0), lambda: recorder.is_capturing
    ):
        try:
            yield
        finally:
            if graph.capture is not None:  # the script ended before
                graph.capture.close()


class _Capture:
    """Follows what happens while a graph is captured."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._events = recorder.recording.events
        self._start = len(self._events)
        self._told: list[tuple[int, Callable[[], None]]] = []
        self._depth = 0
        self._hook = register_optimizer_step_post_hook(self._after_step)
        follow(self)

    def enter(self, module: nn.Module) -> None:
        """A module is called, which may begin a step."""
        if not self._depth:
            self._tell(partial(call_followers, module))
        self._depth += 1

    def leave(self) -> None:
        """The call ends."""
        self._depth -= 1

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._tell(partial(_torch.call_step_hooks, optimizer))

    def _tell(self, call: Callable[[], None]) -> None:
        self._told.append((len(self._events), call))

    def close(self) -> list[_Part]:
        """End; what a replay does, in order."""
        self._hook.remove()
        unfollow(self)
        parts: list[_Part] = []
        start = self._start
        for place, call in [*self._told, (len(self._events), None)]:
            parts += [e for e in self._events[start:place] if isinstance(e, _WORK)]
            parts += [] if call is None else [call]
            start = place
        return parts


class _Graph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    recorder: Recorder
    pools: "count[int]"
    capture: _Capture | None = None  # the one that is under way

    def __init__(self, keep_graph: bool = False) -> None:
        self._parts: list[_Part] | None = None
        self._pool = (0, 0)
        self._stream = 0

    def capture_begin(
        self,
        pool: tuple[int, int] | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        recorder = self.recorder
        if recorder.is_capturing:
            raise UsageError(
                "torch.cuda.CUDAGraph.capture_begin: another CUDA graph is being captured. "
                "End that capture first."
            )
        if not recorder.stream:
            raise UsageError(
                "torch.cuda.CUDAGraph.capture_begin: the default stream cannot be "
                "captured. Capture inside of `with torch.cuda.graph(graph):`, or on a "
                "stream of your own."
            )
        self._pool = pool or (next(self.pools), 0)
        self._stream = recorder.stream
        recorder.begin_capture(self._pool[0])
        type(self).capture = _Capture(recorder)

    def capture_end(self) -> None:
        capture = self.capture
        if capture is None:
            raise UsageError(
                "torch.cuda.CUDAGraph.capture_end: no capture has begun. Call "
                "capture_begin() first."
            )
        self._parts = capture.close()
        type(self).capture = None
        self.recorder.end_capture()

    def replay(self) -> None:
        if self._parts is None:
            raise UsageError(
                "torch.cuda.CUDAGraph.replay: nothing was captured. Capture with `with "
                "torch.cuda.graph(graph):` before."
            )
        recorder = self.recorder
        if recorder.is_capturing:
            raise UsageError(
                "torch.cuda.CUDAGraph.replay: another CUDA graph is being captured, and "
                "a replay cannot be a part of it. Replay it after that capture."
            )
        _torch.tell_graph_replay()
        recorder.begin_step()
        again = recorder.repeater()
        current, steps = recorder.stream, recorder.recording.steps
        events = recorder.recording.events
        events.append(Mark(MarkKind.REPLAY_BEGIN, steps))
        if current != self._stream:
            events.append(StreamWait(self._stream, current))
        for part in self._parts:
            if isinstance(part, tuple):
                again(part)
            else:
                part()
        if current != self._stream:
            events.append(StreamWait(current, self._stream))
        events.append(Mark(MarkKind.REPLAY_END, steps))

    def pool(self) -> tuple[int, int]:
        return self._pool

    def reset(self) -> None:
        self._parts = None

    def instantiate(self) -> None:
        """Nothing is launched."""

    def enable_debug_mode(self) -> None:
        """There is nothing to write."""

    def debug_dump(self, debug_path: str) -> None:
        self.recorder.skip("torch.cuda.CUDAGraph.debug_dump: nothing is written")
