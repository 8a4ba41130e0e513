"""``torchspmd trace``: run a script, record its communication, print the table."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from torchspmd._cli.gather import (
    HeldStore,
    differing_ranks,
    gather_ledgers,
    hold_store,
)
from torchspmd._cli.output import say_written, status_line
from torchspmd._cli.process import NEVER_FREED, say
from torchspmd._cli.script import run_script
from torchspmd._cli.simulate import rehearsed_world, simulated_world
from torchspmd._cli.words import typed_command
from torchspmd.comm import Ledger, format_count, ledger_to_dict, save_ledger
from torchspmd.comm.tree import sum_ledgers
from torchspmd.rehearse.nodes import GPUS_PER_NODE, Nodes
from torchspmd.rehearse.window import StepWindow
from torchspmd.rehearse.world import World
from torchspmd.report import format_bytes, print_ledger, write_page
from torchspmd.trace import CommDebugMode


@dataclass(frozen=True, slots=True)
class _World:
    """How the script is run."""

    size: int
    rank: int
    simulated: bool
    fake: bool = False
    gpu: str | None = None
    gpus_per_node: int = GPUS_PER_NODE

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}" + (
            " (simulated)" if self.simulated else ""
        )


def run(options: argparse.Namespace) -> int:
    """Trace the script and report; 1 when the script fails."""
    world = _world(options)
    mode = CommDebugMode(sources=options.sources)
    line = status_line(
        f"tracing {options.script} as {world}",
        quiet=not world.simulated and world.rank != 0,
    )
    window = StepWindow(mode, skip=options.skip, steps=options.steps, show=line.show)
    left = None if world.simulated else NEVER_FREED
    with line, _surroundings(world) as (held, notes):
        succeeded = run_script(
            options.script,
            options.arguments,
            mode,
            window,
            module=options.module,
            left=left,
        )
    if not succeeded:
        steps = format_count(window.num_optimizer_steps, "optimizer step")
        failed = f"{options.script} failed after {steps}; no report was written."
        say("trace", failed, *notes)
        return 1
    window.refuse_if_empty()
    if world.simulated:
        _report(options, mode.ledger, notes, window, world)
        return 0
    ledgers = gather_ledgers(mode.ledger, held, world.rank, world.size)
    if ledgers:
        _report(options, sum_ledgers(ledgers), differing_ranks(ledgers), window, world)
    return 0


def _world(options: argparse.Namespace) -> _World:
    if options.world_size is not None:
        return _World(
            options.world_size,
            options.rank,
            True,
            fake=options.fake,
            gpu=options.gpu,
            gpus_per_node=options.gpus_per_node or GPUS_PER_NODE,
        )
    environment = os.environ
    return _World(int(environment["WORLD_SIZE"]), int(environment["RANK"]), False)


@contextlib.contextmanager
def _surroundings(world: _World) -> Iterator[tuple[HeldStore, list[str]]]:
    """What the script runs inside of: a simulated world, or its own; with its notes."""
    if world.fake:
        ranks = World(world.size, world.rank, Nodes(world.gpus_per_node))
        with rehearsed_world(ranks, world.gpu) as notes:
            yield HeldStore(), notes
    elif world.simulated:
        with simulated_world(world.size, world.rank, use_gpu=True) as notes:
            yield HeldStore(), notes
    else:
        with hold_store() as held:
            yield held, []


def _report(
    options: argparse.Namespace,
    ledger: Ledger,
    notes: list[str],
    window: StepWindow,
    world: _World,
) -> None:
    console = Console()
    ranks = str(world) if world.simulated else f"the sum of {world.size} ranks"
    # The path has a line to itself: it is copied whole, however long it is.
    console.print(str(options.script), highlight=False, markup=False, soft_wrap=True)
    console.print(f"{ranks}, {_steps_text(window)}\n", highlight=False, markup=False)
    print_ledger(ledger, console, num_ranks=1 if world.simulated else world.size)
    for line in [*notes, *_setup_lines(window)]:
        console.print(line, highlight=False, markup=False)
    about = _about(options, window, world)
    if options.out is not None:
        save_ledger(ledger, options.out, about=about)
        say_written("Ledger", options.out)
    if options.html is not None:
        write_page(ledger_to_dict(ledger, about=about), options.html)
        say_written("Page", options.html)


def _about(
    options: argparse.Namespace, window: StepWindow, world: _World
) -> dict[str, Any]:
    """How the ledger came about, for its file and page."""
    return {
        "command": typed_command(options),
        "script": str(options.script),
        "world_size": world.size,
        "rank": world.rank,
        "num_ranks": 1 if world.simulated else world.size,
        "steps": window.num_recorded,
    }


def _steps_text(window: StepWindow) -> str:
    if window.num_recorded == 0:
        return "no optimizer step was seen: the whole run from the first module call"
    return format_count(window.num_recorded, "optimizer step")


def _setup_lines(window: StepWindow) -> list[str]:
    if window.setup is None:
        return ["No module was called: everything the script sent is in the table."]
    total = window.setup.total()
    if total.count == 0:
        return []
    line = (
        "Set-up, before the first module call and not in the tables: "
        f"{format_count(total.count, 'communication')}, "
        f"{format_bytes(total.payload_bytes)} payload."
    )
    return [line]
