"""A runtime whose clock says what a test wants, for steps that time their backends."""

import contextlib

from torchspmd.step.runtime import Runtime


class Watch:
    """Each call that is timed takes as long as was said."""

    def __init__(self, seconds):
        self.seconds, self.runs = seconds, []

    def begin_run(self):
        self.runs.append({})

    def mark(self, place):
        self.runs[-1][place] = place * self.seconds

    def read(self):
        return self.runs


class Timed(Runtime):
    """Notes which backend made each call; Inductor's part is played by the graph.

    Args:
        graph: How long a call of the graph takes.
        inductor: How long a call of Inductor takes.
        compiles: Whether Inductor itself compiles.
    """

    def __init__(self, graph, inductor, *, compiles=False):
        self.compiles, self.made = compiles, []
        self.seconds = [graph, inductor]
        self.watches = []

    def stopwatch(self, on_stream):
        self.watches.append(Watch(self.seconds[len(self.watches) % 2]))
        return self.watches[-1]

    def compile_graph(self, graph, compiled):
        if self.compiles:
            return super().compile_graph(graph, compiled)
        return graph.forward, "Inductor: played by the graph"

    @contextlib.contextmanager
    def running(self, program, inventory):
        self.made.append(program.backend)
        yield
