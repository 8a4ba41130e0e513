"""Allocated and reserved bytes of a recording that is still being made."""

from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.curve import Run
from torchspmd.predict.hardware import Hardware
from torchspmd.rehearse.recording import Recording

__all__ = ["LiveMemory"]


class LiveMemory:
    """Counts when it is asked: what a rehearsed script reads from ``torch.cuda``."""

    def __init__(
        self, recording: Recording, gpu: Hardware, settings: AllocatorSettings
    ) -> None:
        self._recording = recording
        self._run = Run(gpu, settings)
        self._taken = self._reset = 0
        self._floor = (0, 0)

    def count(self) -> tuple[int, int]:
        """Allocated and reserved bytes now."""
        events = self._recording.events
        for place in range(self._taken, len(events)):
            self._run.take(place, events[place])
        self._run.settle(len(events) - 1)
        self._taken = len(events)
        return self._run.allocator.allocated, self._run.allocator.reserved

    def peaks(self) -> tuple[int, int]:
        """The most of them since the last reset."""
        self.count()
        curve = self._run.curve
        return (
            max(curve.allocated[self._reset :], default=self._floor[0]),
            max(curve.reserved[self._reset :], default=self._floor[1]),
        )

    def reset_peaks(self) -> None:
        """Forget the peaks: what is there now is the most."""
        self._floor = self.count()
        self._reset = max(len(self._run.curve) - 1, 0)
