"""When a candidate need not be rehearsed any further: after its first step.

What does not fit by then never does. And no step is shorter than its kernels: where these
alone are slower than the best candidate so far, the rest cannot help.
"""

from dataclasses import dataclass

from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import Hardware
from torchspmd.predict.memory import Fits, count_memory
from torchspmd.predict.operators import Pricer
from torchspmd.predict.prediction import counts_for_model
from torchspmd.predict.program import price_step
from torchspmd.predict.time_text import seconds_text
from torchspmd.predict.timeline import Kind
from torchspmd.rehearse.recording import Comm, Event, Op, Phase, Recording
from torchspmd.rehearse.world import EndOfWindow

__all__ = ["Bounds"]


@dataclass(slots=True)
class Bounds:
    """What the best candidate so far does.

    Attributes:
        gpu: The device.
        settings: Of its allocator.
        flops_rate: Model FLOPs a second; 0: nothing is known.
        seconds: Of a step with as much work as this one's; 0: nothing is known.
        is_reached: Whether a rehearsal ended here.
        slower: Why it cannot be the best; "" where it does not fit.
    """

    gpu: Hardware
    settings: AllocatorSettings
    flops_rate: float = 0.0
    seconds: float = 0.0
    is_reached: bool = False
    slower: str = ""

    def look(self, recording: Recording) -> None:
        """After the first step: end a rehearsal that need not go on.

        Raises:
            EndOfWindow: It need not.
        """
        if not self.flops_rate and not self.seconds:
            return
        self.slower = self.why_slower(recording)
        account = count_memory(recording, self.gpu, self.settings)
        self.is_reached = bool(self.slower) or account.fits is Fits.NO
        if self.is_reached:
            raise EndOfWindow

    def why_slower(self, recording: Recording) -> str:
        """Why it cannot be the best; "" where it can."""
        if not self.flops_rate and not self.seconds:
            return ""
        if not self.seconds and any(
            isinstance(event, Comm) and event.peer >= 0 for event in recording.events
        ):
            return ""  # another stage of the pipeline may do more than this one
        program = price_step(recording, Pricer(Figures(self.gpu)), keep=_always_there)
        kernels = sum(i.work for i in program.items if i.kind is Kind.COMPUTE)
        flops = sum(
            cost.flops
            for place, cost in program.costs.items()
            if counts_for_model(recording.events[place])
        )
        most = self.seconds or flops / self.flops_rate
        if kernels <= most:
            return ""
        return (
            f"left out: its kernels alone take {seconds_text(kernels)}, the best so far "
            f"does as much work in {seconds_text(most)}"
        )


def _always_there(event: Event) -> bool:
    """Kernels of every step: optimizers make their state in the first one only."""
    return isinstance(event, Op) and event.site.phase is not Phase.OPTIMIZER
