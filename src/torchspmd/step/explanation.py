"""What a program is and costs, in lines for people."""

import statistics

from torchspmd.step.program import Program


def explain_program(program: Program) -> list[str]:
    """Why a program was captured, what it communicates, and how long it takes."""
    total = program.ledger.total()
    more = [
        *program.reason.splitlines(),
        *program.describe_memory(),
        *program.describe_deferral(),
        *program.notes,
        program.certificate.summary(),
    ]
    return [
        f"  program {program.number}: {len(program.graph.graph.nodes)} nodes, "
        f"{total.count} collectives, {total.payload_bytes} payload bytes, "
        f"captured in {program.capture_seconds:.2f} s{_times(program)}",
        *(f"    {line}" for line in more),
    ]


def _times(program: Program) -> str:
    if program.first_run_seconds is None:
        return ""
    text = f", first run {program.first_run_seconds * 1e3:.1f} ms"
    if program.step_seconds:
        median = statistics.median(program.step_seconds)
        text += f", step {median * 1e3:.1f} ms"
    return text
