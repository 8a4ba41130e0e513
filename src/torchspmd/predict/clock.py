"""Predicted time while a script is still being rehearsed: what its own clock tells."""

from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import Hardware
from torchspmd.predict.operators import Pricer
from torchspmd.predict.prediction import simulate_programs
from torchspmd.predict.program import price_events
from torchspmd.rehearse.recording import Recording, Synchronize

__all__ = ["LiveClock"]


class LiveClock:
    """Runs what was recorded so far on the simulated clock, when it is asked.

    What lies before the last wait of the host for the whole device is simulated once.
    """

    def __init__(
        self, recording: Recording, gpu: Hardware, network: Hardware | None
    ) -> None:
        self._recording = recording
        self._figures = Figures(gpu, network)
        self._pricer = Pricer(self._figures)
        self._start = 0  # of what is not over
        self._before = 0.0  # seconds of what is
        self._events: dict[int, float] = {}

    def now(self) -> float:
        """Seconds since the script began, as its host would count them."""
        events = self._recording.events
        places = range(self._start, len(events))
        if not places:
            return self._before
        program = price_events(self._recording, self._pricer, places)
        run, _ = simulate_programs([program], self._figures, rounds=1)
        for number, seconds in run.events[0].items():
            self._events[number] = self._before + seconds
        time = self._before + run.marks[0][-1]
        last = events[-1]
        if isinstance(last, Synchronize) and last.event is None and last.stream is None:
            self._before, self._start = time, len(events)
        return time

    def elapsed(self, first: int, second: int) -> float:
        """Milliseconds between two recorded events, as ``Event.elapsed_time`` has them."""
        self.now()
        missing = [number for number in (first, second) if number not in self._events]
        if missing:
            return 0.0
        return 1e3 * (self._events[second] - self._events[first])
