"""What check_parity finds, as values and as text."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchspmd.comm import format_count
from torchspmd.layout.rounding import Tolerance
from torchspmd.verify.parity.causes import Cause
from torchspmd.verify.recording.files import Kind

BITWISE = Tolerance(0.0, "bitwise, as asked for")

_PLURALS = {
    Kind.INPUT: "inputs",
    Kind.FORWARD: "activations",
    Kind.LOSS: "losses",
    Kind.OUTPUT: "outputs of the step",
    Kind.GRAD_OUTPUT: "gradients of outputs",
    Kind.GRAD_INPUT: "gradients of inputs",
    Kind.GRADIENT: "gradients of parameters",
    Kind.PARAMETER: "parameters",
    Kind.BUFFER: "buffers",
    Kind.STATE: "optimizer states",
}
_MAX_LINES = 8  # of one list; the rest is counted


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that is not what it is on one device.

    ``relative`` is the largest difference, relative to the largest element on one device.
    ``place`` is the module, or ``(loss)``, ``(all parameters)`` and the like.
    """

    step: int
    kind: Kind
    name: str
    place: str
    relative: float
    allowed: float
    ranks: tuple[int, ...]
    layout: str
    cause: Cause

    def describe(self) -> list[str]:
        """What differs, where, by how much, and why; one line each."""
        when = "before the first step" if self.step < 0 else f"in step {self.step}"
        what = f"{self.kind.value} {self.name!r}" if self.name else self.kind.value
        ranks = ", ".join(map(str, self.ranks))
        return [
            f"{what} {when}, on rank {ranks} [{self.layout}]",
            f"differs by {self.relative:.2g} of its size; {self.allowed:.2g} is allowed",
            f"likely cause ({self.cause.code}): {self.cause.text}",
        ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a parallel run computes what one device computes, and what was compared.

    ``first`` is where the difference begins, in the order of execution: forward, loss,
    backward, parameters. ``vacuous`` lists why an agreement would mean nothing.
    """

    ok: bool
    first: Difference | None
    differences: tuple[Difference, ...]
    vacuous: tuple[str, ...]
    compared: Mapping[str, int]
    num_steps: int
    world: str
    tolerance: Tolerance
    notes: tuple[str, ...] = field(default=())

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(verdict: Verdict) -> list[str]:
    word = "agrees with" if verdict.ok else "does not agree with"
    lines = [f"parity: the parallel run ({verdict.world}) {word} one device"]
    first = verdict.first
    if first is not None:
        lines += ["", f"  first difference: {first.place}"]
        lines += [f"    {line}" for line in first.describe()]
        lines += _rest(verdict, first)
    if verdict.vacuous:
        lines += ["", "  the agreement would mean nothing:"]
        lines += _listed(list(verdict.vacuous))
    lines += [
        "",
        f"  compared, {format_count(verdict.num_steps, 'step')}: {_counts(verdict)}",
    ]
    lines.append(f"  tolerance: {_tolerance(verdict.tolerance)}")
    lines += [f"  note: {note}" for note in verdict.notes]
    return lines


def _rest(verdict: Verdict, first: Difference) -> list[str]:
    others = [
        f"{each.kind.value} {each.name!r}: {each.relative:.2g} ({each.cause.code})"
        for each in verdict.differences
        if each is not first
    ]
    if not others:
        return []
    return ["", "  what follows from it, or differs too:", *_listed(others)]


def _listed(lines: list[str]) -> list[str]:
    shown = [f"    * {line}" for line in lines[:_MAX_LINES]]
    more = len(lines) - len(shown)
    return shown + ([f"    and {more} more"] if more else [])


def _counts(verdict: Verdict) -> str:
    counted = verdict.compared.items()
    return ", ".join(f"{_PLURALS[Kind(kind)]} {count}" for kind, count in counted)


def _tolerance(tolerance: Tolerance) -> str:
    if tolerance.is_bitwise:
        return tolerance.reason
    return (
        f"{tolerance.relative:.2g} of a tensor's size in the first step "
        f"({tolerance.reason})"
    )
