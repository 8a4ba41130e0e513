"""What stays of the programs of a step that was closed: what they said, not the graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from torchspmd.comm import Ledger
from torchspmd.errors import UsageError
from torchspmd.step.capture.modes import Spread
from torchspmd.step.explanation import explain_program
from torchspmd.step.graph.memory import PeakMemory
from torchspmd.step.meeting import describe
from torchspmd.step.passes.in_place import InPlaceReport
from torchspmd.step.program import Program
from torchspmd.step.virtual.certificate import Certificate


@dataclass(frozen=True, slots=True, repr=False)
class ClosedProgram:
    """What is known about a program whose step was closed; it holds no graph or tensor.

    Attributes:
        number: Its place among the programs of its compiled step.
        num_nodes: How many nodes its graph had.
        reason: Why it was captured.
        ledger: What the graph communicated.
        certificate: Which passes ran, what they claim, what was checked and what not.
        in_place: Which new values were computed in the memory of the old ones.
        peak_memory: What was alive at the worst moment.
        notes: What else was done to the graph, a line each.
        capture_seconds: Time to trace, transform and compile it.
        first_run_seconds: Time of its first run, after capture.
        step_seconds: Times of the latest runs after the first.
        explanation: The lines of ``explain()`` about it.
    """

    number: int
    num_nodes: int
    reason: str
    ledger: Ledger
    certificate: Certificate
    in_place: InPlaceReport
    peak_memory: PeakMemory | None
    notes: tuple[str, ...]
    capture_seconds: float
    first_run_seconds: float | None
    step_seconds: tuple[float, ...]
    explanation: tuple[str, ...]

    @classmethod
    def of(cls, program: Program) -> "ClosedProgram":
        """What to keep of a program."""
        return cls(
            number=program.number,
            num_nodes=len(program.graph.graph.nodes),
            reason=program.reason,
            ledger=program.ledger,
            certificate=program.certificate,
            in_place=program.in_place,
            peak_memory=program.peak_memory,
            notes=program.notes,
            capture_seconds=program.capture_seconds,
            first_run_seconds=program.first_run_seconds,
            step_seconds=tuple(program.step_seconds),
            explanation=tuple(explain_program(program)),
        )

    def __repr__(self) -> str:
        """One line, as of a program."""
        return f"ClosedProgram({self.number}: {self.num_nodes} nodes, {self.ledger!r})"

    @property
    def graph(self) -> NoReturn:
        """Gone with its step."""
        raise self._gone("graph")

    @property
    def code(self) -> NoReturn:
        """Gone with its step."""
        raise self._gone("code")

    def _gone(self, name: str) -> UsageError:
        return UsageError(
            f"program {self.number}: its step was closed, by close() or the end of `with`, "
            f"and no graph is kept then. Look at programs[{self.number}].{name} before "
            "that; what stays is certificate, ledger, peak_memory, in_place, reason, notes "
            "and times."
        )


def explain(name: str, programs: Sequence[Program | ClosedProgram], closed: str) -> str:
    """Which programs a step has, or had before it was closed, and by what."""
    lines = [f"{name}: {len(programs)} programs{closed and f', closed by {closed}'}"]
    for program in programs:
        if isinstance(program, ClosedProgram):
            lines += program.explanation
        else:
            lines += explain_program(program)
    return "\n".join(lines)


def check_usable(name: str, closed: str, spread: Spread | None) -> None:
    """Raise where a step was closed, and by what, or has no ranks to talk to any more."""
    if closed:
        raise UsageError(
            f"{name}: this compiled step was closed by {closed}, and cannot be called any "
            "more. Compile its function again (of a decorated one, it is __wrapped__). "
            "Between epochs call flush() instead, with one `with` around all of them."
        )
    if spread is not None and spread.mesh is not None and not dist.is_initialized():
        raise UsageError(
            f"{name}: this step was captured for the mesh {describe(spread.mesh)}, whose "
            "process groups were destroyed since, so that it cannot be called any more. "
            "Call it before destroy_process_group(), or compile its function again behind "
            "init_process_group()."
        )
