"""How long computation waits for each collective of a step, measured, and why."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torchspmd.comm import CommEvent, Kind, Phase, format_bytes
from torchspmd.step.graph.collectives import CommBlock
from torchspmd.step.graph.metadata import owner_of
from torchspmd.step.graph.reports import wrap_text
from torchspmd.step.graph.simulate import Exposure, explain
from torchspmd.step.measure.clock import HIDDEN_SECONDS, Reading

_HIDDEN_MS = HIDDEN_SECONDS * 1e3
_FAR = 0.5  # of the larger one: two times are said to differ
_SOME = 0.05  # of its time under way: a collective is said to wait for others


@dataclass(frozen=True, slots=True)
class MeasuredExposure:
    """One collective of a running step, on one rank; medians, in milliseconds.

    Attributes:
        start: The node that starts it.
        event: What it communicates.
        what: Whose it is: a module, or ``bucket of 6 gradients``.
        modules: The modules whose tensors it carries.
        exposed_ms: How long computation waited for it.
        is_hidden: Whether computation went on as if it were not there.
        distance_ms: From its start to the first wait for it.
        simulated_ms: How long it is exposed in the simulation; None where not known.
        reason: Why it is exposed, and where the simulation says otherwise; empty when
            it is hidden, also in the simulation.
        least: The rank of its group that waits least, and how long; None where the
            other ranks are not known.
    """

    start: str
    event: CommEvent
    what: str
    modules: tuple[str, ...]
    exposed_ms: float
    is_hidden: bool
    distance_ms: float
    simulated_ms: float | None
    reason: str
    least: tuple[int, float] | None = None

    @property
    def disagrees(self) -> bool:
        """Whether the simulation says something else."""
        simulated = self.simulated_ms
        seen = 0.0 if self.is_hidden else self.exposed_ms
        return simulated is not None and _differ(seen, simulated)

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        event = self.event
        return {
            "start": self.start,
            "kind": event.kind.value,
            "dtype": event.dtype,
            "payload_bytes": event.payload_bytes,
            "axis": event.axis,
            "phase": event.phase.value,
            "what": self.what,
            "modules": list(self.modules),
            "exposed_ms": self.exposed_ms,
            "is_hidden": self.is_hidden,
            "distance_ms": self.distance_ms,
            "simulated_ms": self.simulated_ms,
            "reason": self.reason,
            "least": None if self.least is None else list(self.least),
        }

    def __str__(self) -> str:
        """One line, and one for the reason."""
        known = self.simulated_ms is not None
        simulated = f" ({self.simulated_ms:.2f} simulated)" if known else ""
        line = (
            f"{self.start}: {self.exposed_ms:.2f} ms exposed{simulated}, {self.what}, "
            f"{format_bytes(self.event.payload_bytes)} over {self.event.axis}"
        )
        return f"{line}\n{self.reason}" if self.reason else line


@dataclass(frozen=True, slots=True)
class ExposureReport:
    """What of a step's communication is not hidden, measured on this rank.

    Attributes:
        program: The step and the number of its program.
        rank: Who measured.
        device: ``cpu``: time that the host is blocked. ``cuda``: time that the stream
            which computes waits.
        form: ``whole``, or ``steady`` for a step that leaves work for the next one.
        runs: How many runs the medians are of.
        step_ms: How long one run takes.
        exposed_ms: How long computation waits for all its collectives.
        simulated_step_ms: How long one run takes in the simulation.
        collectives: Every collective that is waited for, in the order of their starts.
        notes: What the figures do not say, a sentence each.
    """

    program: str
    rank: int
    device: str
    form: str
    runs: int
    step_ms: float
    exposed_ms: float
    simulated_step_ms: float
    collectives: tuple[MeasuredExposure, ...]
    notes: tuple[str, ...] = ()

    @property
    def simulated_ms(self) -> float:
        """How long computation waits in the simulation."""
        return sum(each.simulated_ms or 0.0 for each in self.collectives)

    @property
    def everywhere_ms(self) -> float:
        """How much of it no rank escapes; the rest waits for ranks that come later."""
        return sum(
            each.exposed_ms if each.least is None else each.least[1]
            for each in self.collectives
        )

    def worst(self, count: int) -> tuple[MeasuredExposure, ...]:
        """The collectives that are exposed longest."""
        most = sorted(self.collectives, key=lambda each: -each.exposed_ms)
        return tuple(most[:count])

    def summary(self) -> str:
        """One sentence with the sums."""
        exposed = [each for each in self.collectives if not each.is_hidden]
        return (
            f"{self.program}, rank {self.rank}, {self.device}, {self.form}: "
            f"{self.exposed_ms:.2f} ms of {self.step_ms:.2f} ms wait for "
            f"{len(exposed)} of {len(self.collectives)} collectives (simulated "
            f"{self.simulated_ms:.2f} ms of {self.simulated_step_ms:.2f} ms), median of "
            f"{self.runs} runs"
        )

    def __str__(self) -> str:
        """The sums, the five that are exposed longest, and the notes; 80 columns."""
        lines = wrap_text(self.summary(), 0)
        for each in self.worst(5):
            head, *reason = str(each).splitlines()
            lines += wrap_text(head, 2)
            lines += [text for line in reason for text in wrap_text(line, 4)]
        for note in self.notes:
            lines += wrap_text(f"* {note}", 2)
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, all collectives included."""
        entries: dict[str, Any] = {"format": "torchspmd/exposure", "version": 1}
        entries |= {each.name: getattr(self, each.name) for each in fields(self)}
        entries["simulated_ms"] = self.simulated_ms
        entries["everywhere_ms"] = self.everywhere_ms
        entries["collectives"] = [each.as_dict() for each in self.collectives]
        return {**entries, "notes": list(self.notes)}

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.as_dict(), indent=2)


def describe_exposure(
    block: CommBlock,
    reading: Reading,
    simulated: Exposure | None,
    by_rank: Mapping[int, float],
) -> MeasuredExposure:
    """Put together what is known of one collective.

    Args:
        block: It, in the graph.
        reading: What the clock said.
        simulated: What the simulation says; None where it knows nothing of it.
        by_rank: How long it is exposed on each rank of its group, in milliseconds; empty
            where that is not known.
    """
    sources = block.sources()
    least = min(by_rank.items(), key=lambda item: item[1], default=None)
    reasons = _measured_reasons(reading, least)
    found = MeasuredExposure(
        start=block.start.name,
        event=block.event,
        what=_whose(block, len(sources)),
        modules=tuple(dict.fromkeys(owner_of(each).module for each in sources)),
        exposed_ms=reading.exposed * 1e3,
        is_hidden=reading.is_hidden,
        distance_ms=reading.distance * 1e3,
        simulated_ms=None if simulated is None else simulated.exposed_seconds * 1e3,
        reason="; ".join(reasons),
        least=least,
    )
    if simulated is None or not found.disagrees:
        return found
    return replace(
        found, reason="; ".join([*reasons, _simulated_reason(simulated, reasons)])
    )


def _measured_reasons(reading: Reading, least: tuple[int, float] | None) -> list[str]:
    """The reasons of the simulation, with measured times."""
    if reading.is_hidden:
        return []
    end = reading.distance + reading.exposed
    queued = reading.queued if reading.queued > _SOME * end else 0.0
    reasons = [explain(0.0, queued, reading.distance, end)]
    exposed = reading.exposed * 1e3
    # A collective ends on all ranks at about one time: who waits least came last.
    if least is not None and _differ(exposed, least[1]):
        reasons.append(f"rank {least[0]} comes later and waits {least[1]:.2f} ms")
    return reasons


def _simulated_reason(simulated: Exposure, measured: list[str]) -> str:
    """What the simulation says instead."""
    if not simulated.reason:
        return "hidden in the simulation"
    text = f"simulated {simulated.exposed_seconds * 1e3:.2f} ms"
    if simulated.reason not in measured:
        text += f": {simulated.reason}"
    return text if measured else f"hidden; {text}"


def _differ(one: float, other: float) -> bool:
    """Whether two times in milliseconds do not tell the same."""
    larger = max(one, other)
    return larger > _HIDDEN_MS and abs(one - other) > _FAR * larger


def _whose(block: CommBlock, count: int) -> str:
    if count < 2:
        return block.event.module
    if block.gathers_inputs():
        return f"bucket of {count} parameters"
    is_reduction = block.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
    is_gradient = is_reduction and block.event.phase is not Phase.FORWARD
    return f"bucket of {count} {'gradients' if is_gradient else 'tensors'}"
