"""The measured exposure of a compiled step's program, on all its ranks together."""

import json
from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import fx

from torchspmd.errors import AgreementError, UsageError
from torchspmd.step.agreement import exchange
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.exposure import ByRank, measure_exposure
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.exposure_report import ExposureReport
from torchspmd.step.graph.ledger import peers_of
from torchspmd.step.iterate.iteration import IterGraphModule
from torchspmd.step.program import Program

_SECONDS = 60.0  # how long ranks wait for each other


def measure_program(
    name: str,
    program: Program | None,
    inventory: Inventory,
    key: str,
    *,
    runs: int,
    cost: CostModel | None,
    is_compiled: bool,
) -> ExposureReport:
    """Measure a program with the inputs of a call; nothing of the call is changed.

    Args:
        name: The step, in messages.
        program: What serves the call; None where nothing does.
        inventory: What the call works on.
        key: Names the measurement in the store; the same on every rank, used once.
        runs: How many runs to take medians of.
        cost: The rates of the simulation.
        is_compiled: Whether a compiler makes something else of the program's graph.
    """
    if program is None:
        raise UsageError(
            f"exposure of {name!r}: no program fits these arguments yet. Make a step with "
            "them first; the first step of an optimizer is a program of its own, so make "
            "two."
        )
    if program.peak_memory is None:
        raise UsageError(
            f"exposure of {name!r}: gm_transformation returned a callable of its own, "
            "whose collectives cannot be seen. Return the graph module."
        )
    graph, first = _graphs(program)
    peers = _Peers(name, graph, key)
    peers.agree(f"{runs} runs of program {program.number}")
    report = measure_exposure(
        graph,
        inventory.flat_inputs(),
        first=first,
        runs=runs,
        cost=cost,
        program=f"{name}, program {program.number}",
        share=peers.share,
    )
    notes = [*report.notes, *peers.notes]
    if is_compiled:
        notes.append("measured operator by operator, not as the compiled code runs")
    return replace(report, notes=tuple(notes))


def _graphs(program: Program) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """What is run again and again, and what the first time if that is another graph."""
    run = program.run
    if isinstance(run, IterGraphModule) and run.is_deferring:
        return run.forms["steady"], run.forms["first"]
    return program.graph, None


class _Peers:
    """The ranks that this one communicates with in a graph."""

    def __init__(self, name: str, graph: fx.GraphModule, key: str) -> None:
        self._name, self._key = name, key
        ranks = peers_of(graph)
        self._ranks = ranks if len(ranks) > 1 else []
        self.notes: list[str] = []
        if self._ranks and dist.get_backend() == "fake":
            raise UsageError(
                f"exposure of {name!r}: a fake process group sends nothing, so there is "
                "nothing to measure. Run it on real ranks, or simulate the graph with "
                "torchspmd.step.graph.timeline.simulate."
            )

    def agree(self, text: str) -> None:
        """Raise on every rank if they would not run the same."""
        if not self._ranks:
            return
        texts, missing = exchange(
            text, self._ranks, f"{self._key}/asked", seconds=_SECONDS
        )
        problems = [f"rank {rank}: not here after {_SECONDS:g} s" for rank in missing]
        if len(set(texts.values())) > 1:
            problems += [f"rank {rank}: {theirs}" for rank, theirs in texts.items()]
        if problems:
            lines = "\n".join(f"  * {line}" for line in problems)
            raise AgreementError(
                f"exposure of {self._name!r}: ranks do not ask for the same\n\n{lines}\n\n"
                "Every rank must call it at the same place, with the same runs."
            )

    def share(self, own: Mapping[str, float]) -> ByRank:
        """How long each collective is exposed on each rank, in milliseconds."""
        if not self._ranks:
            return {}
        texts, missing = exchange(
            json.dumps(dict(own)), self._ranks, f"{self._key}/found", seconds=_SECONDS
        )
        self.notes += [f"rank {rank} did not say what it measured" for rank in missing]
        return {rank: json.loads(text) for rank, text in texts.items()}
