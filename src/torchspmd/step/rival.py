"""Which backends a program gets with ``backend="auto"``: the graph, Inductor, or both."""

from dataclasses import dataclass, replace

import torch.distributed as dist

from torchspmd import _torch
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.parallel_mode import ParallelMode
from torchspmd.step.capture.trace import Captured
from torchspmd.step.lower.backends import (
    BackendChoice,
    Lowered,
    Transformed,
    for_inductor,
    lower_graph,
)
from torchspmd.step.programs import Request
from torchspmd.step.progress import logger
from torchspmd.step.rank_agreement import READY_SECONDS, Agreement, CommPlan
from torchspmd.step.runtime import Runtime

_TIMED = "graph and Inductor take turns and are timed"


@dataclass(frozen=True, slots=True)
class Rivals:
    """What a program is run by.

    Attributes:
        lowered: What runs its graph.
        rival: What does the same with Inductor, where both are to be timed.
        choice: How it was or will be chosen; None where there is no choice.
    """

    lowered: Lowered
    rival: Lowered | None = None
    choice: BackendChoice | None = None


def lower_rivals(
    chosen: Transformed,
    captured: Captured,
    plan: CommPlan,
    why: str,
    ranks: Agreement,
    request: Request,
    runtime: Runtime,
) -> Rivals:
    """Lower a graph for the backends that are asked for, or can be timed.

    Args:
        chosen: The graph.
        captured: The step that it was made of.
        plan: What it sends. Programs that send the same share a backend.
        why: Why its calls cannot be timed; empty where they can be.
        ranks: The ranks that build the program together.
        request: Which program it is.
        runtime: What compiles it.
    """

    def compile_graph() -> Lowered:
        compilers = runtime.compile_graph, runtime.replay_graph
        return lower_graph(for_inductor(chosen), *compilers)

    runs_once = bool(captured.outputs.new_states)  # the next call has them
    choice = None if runs_once else _choice_of(plan, request)
    if choice is not None and choice.needed == ("inductor",):
        return Rivals(compile_graph(), choice=choice)
    lowered = lower_graph(chosen, runtime.compile_graph, runtime.replay_graph)
    if choice is not None:
        is_timed = "inductor" in choice.needed
        return Rivals(lowered, compile_graph() if is_timed else None, choice)
    if runs_once:
        note = "makes the optimizer's states, so it runs once: not timed"
        return Rivals(replace(lowered, notes=(*lowered.notes, note)))
    is_alone = request.like is not None and request.like.plan == plan
    if is_alone and plan.collectives:
        why = "a rank has built it alone"
    rival = None
    if not why:
        try:
            rival = compile_graph()
        except Exception as error:  # whatever a compiler raises, the graph itself runs
            logger.info("backend='auto' without Inductor", exc_info=True)
            lines = str(error).strip().splitlines() or [type(error).__name__]
            why = f"Inductor cannot compile it: {lines[0]}"
    if not is_alone:
        others = filter(None, ranks.share(why, "inductor", READY_SECONDS))
        why = why or next((f"on another rank, {each}" for each in others), "")
    if why:
        return Rivals(lowered, choice=BackendChoice("graph", why=why))
    return Rivals(lowered, rival, BackendChoice(None, why=_TIMED))


def _choice_of(plan: CommPlan, request: Request) -> BackendChoice | None:
    """That of a program that sends the same: another rank may be running it."""
    alike = (each for each in request.known if each.plan == plan and plan.collectives)
    return next((each.choice for each in alike if each.choice is not None), None)


def why_untimed(
    inventory: Inventory,
    captured: Captured,
    plan: CommPlan,
    mode: ParallelMode,
    runtime: Runtime,
) -> str:
    """Why there is nothing to choose by for a program; empty where calls can be timed."""
    if why := runtime.why_untimed():
        return why
    if mode.mesh is not None and dist.get_backend() == "fake":
        return "the process group is fake, and sends nothing"
    if mode.mesh is not None and not plan.ranks <= set(_torch.root_ranks(mode.mesh)):
        return (
            "ranks outside of the mesh take part, with whom it could not be agreed on. "
            "Make the data axis a part of one mesh of all axes"
        )
    if any(slot.tensor.is_meta for slot in inventory.slots):
        return "tensors are on the meta device"
    if captured.sizes:
        return "Inductor does not compile a graph whose sizes are symbols"
    return ""
