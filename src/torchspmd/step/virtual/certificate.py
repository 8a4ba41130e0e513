"""What is known about a compiled step: its passes, their claims, what was checked."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from torchspmd.comm import format_count
from torchspmd.comm.notebook import html_table
from torchspmd.step.graph.reports import ORDERS, PassReport, wrap_text


@dataclass(frozen=True, slots=True)
class Check:
    """Two graphs that were run on virtual ranks and compared.

    Attributes:
        what: The pass, or another edit, between them.
        ranks: The virtual ranks, as text.
        order: The order of reductions.
        steps: How many steps were run, state carried over.
        outputs: How many outputs of each rank and step were compared.
        result: ``equal bits``, or how they differed where no claim was made.
        vacuous: Outputs that were all zero or all NaN, so that they show nothing.
        settled: Outputs with equal bits of which no proof was found.
    """

    what: str
    ranks: str
    order: str
    steps: int
    outputs: int
    result: str
    vacuous: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.what}: {self.result}, {self.outputs} outputs, {self.order} order, "
            f"{self.steps} steps, {self.ranks}"
        )


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was shown about a program, and what was not.

    Attributes:
        program: The step and the number of its program.
        passes: The passes that ran, in order, with what they say and what was proved.
        checks: What was compared on virtual ranks.
        not_checked: What was not checked, a sentence each.

    Example:
        >>> print(Certificate("train_step, program 0", (), (), ("anything",)))
        Certificate of train_step, program 0
          passes: none
          not verified on virtual ranks
          not checked:
            * anything
    """

    program: str
    passes: tuple[PassReport, ...]
    checks: tuple[Check, ...]
    not_checked: tuple[str, ...]

    @property
    def is_verified(self) -> bool:
        """Whether graphs were compared on virtual ranks."""
        return bool(self.checks)

    def summary(self) -> str:
        """One line.

        >>> Certificate("train_step, program 0", (), (), ()).summary()
        'certificate: no pass, not verified on virtual ranks'
        """
        names = ", ".join(map(_short, self.passes)) or "no pass"
        if not self.checks:
            return f"certificate: {names}, not verified on virtual ranks"
        orders = [order for order in ORDERS if order in {c.order for c in self.checks}]
        differing = [c for c in self.checks if c.result != EQUAL]
        found = "equal bits" if not differing else f"{len(differing)} checks differ"
        return (
            f"certificate: {names}, {found} on {self.checks[0].ranks}, orders "
            f"{', '.join(orders)}"
        )

    def __str__(self) -> str:
        """Everything, at 80 columns."""
        lines = [f"Certificate of {self.program}"]
        lines += ["  passes: none"] if not self.passes else ["  passes:"]
        for report in self.passes:
            lines += wrap_text(str(report).splitlines()[0], 4)
            lines += wrap_text(describe_claim(report), 6)
        if self.checks:
            lines.append("  verified on virtual ranks:")
            for check in self.checks:
                lines += wrap_text(str(check), 4)
                if check.vacuous:
                    names = ", ".join(check.vacuous)
                    lines += wrap_text(f"shows nothing (all zero or NaN): {names}", 6)
                if check.settled:
                    names = ", ".join(check.settled)
                    lines += wrap_text(f"not proved, compared here: {names}", 6)
        else:
            lines.append("  not verified on virtual ranks")
        if self.not_checked:
            lines.append("  not checked:")
            for line in self.not_checked:
                lines += wrap_text(f"* {line}", 4)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What a notebook shows: what was compared, and what was not checked."""
        rows = [
            [check.what, check.result, str(check.outputs), check.order, check.ranks]
            for check in self.checks
        ]
        header = ("after", "result", "outputs", "order", "ranks")
        notes = [self.summary(), *(f"not checked: {text}" for text in self.not_checked)]
        return html_table(f"Certificate of {self.program}", header, rows, notes)

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "program": self.program,
            "passes": [report.as_dict() for report in self.passes],
            "checks": [asdict(check) for check in self.checks],
            "not_checked": list(self.not_checked),
        }

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.as_dict(), indent=2)


EQUAL = "equal bits"


def _short(report: PassReport) -> str:
    facts = [] if report.outcome.changed else ["changed nothing"]
    if report.unproved:
        facts.append(f"{format_count(report.unproved, 'output')} not proved")
    return report.name + (f" ({', '.join(facts)})" if facts else "")


def describe_claim(report: PassReport) -> str:
    """What a pass says about bits.

    >>> from torchspmd.step.graph.reports import GraphSize, Outcome
    >>> size = GraphSize(1, 0, 0)
    >>> for claim in (None, (), ("rank", "ring")):
    ...     outcome = Outcome(1, 1, keeps_bits=claim)
    ...     describe_claim(PassReport("fuse", outcome, size, size, "checked", 0.0))
    'makes no claim about bits'
    'says that bits may change'
    'claims to keep bits under rank, ring; not under tree'
    """
    claim = report.outcome.keeps_bits
    if claim is None:
        return "makes no claim about bits"
    if not claim:
        return "says that bits may change"
    left = [order for order in ORDERS if order not in claim]
    rest = f"; not under {', '.join(left)}" if left else ""
    return f"claims to keep bits under {', '.join(claim)}{rest}"
