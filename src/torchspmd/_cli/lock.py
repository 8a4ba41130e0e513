"""``torchspmd lock``: write down what a script's step communicates."""

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.device_mesh import DeviceMesh

from torchspmd._cli.output import status_line
from torchspmd._cli.process import say
from torchspmd._cli.script import run_script
from torchspmd._cli.simulate import rehearsed_world, simulated_world
from torchspmd._cli.usage.common import parse_mesh, refuse
from torchspmd._cli.usage.lock import simulation_problems
from torchspmd.comm import format_bytes, format_count
from torchspmd.errors import UsageError
from torchspmd.rehearse.nodes import GPUS_PER_NODE, Nodes
from torchspmd.rehearse.window import StepWindow
from torchspmd.rehearse.world import World
from torchspmd.trace import CommDebugMode
from torchspmd.verify.lock.lockfile import Lock, Recipe, lock_ledger, save_lock
from torchspmd.verify.lock.memory import MemoryWatch

# ----------------------------------------------------------------------------
# Simulate a script on this one process and lock what it does; lock and check share it.

_MAX_EVENTS = 1_000_000


def simulate(recipe: Recipe, folder: Path, command: str) -> Lock | None:
    """Run the recipe's script, which lies relative to the folder; None when it fails.

    What the script prints goes to standard error: standard output is for the answer.
    """
    axes = parse_mesh(recipe.mesh)
    world_size = math.prod(axes.values())
    script = Path(os.path.relpath(folder / recipe.script))
    refuse(
        simulation_problems(
            script, recipe.steps, recipe.skip, rank=recipe.rank, size=world_size
        )
    )
    what = f"locking {script} as rank {recipe.rank} of {world_size} (simulated)"
    line = status_line(what)
    mode, watch = CommDebugMode(sources=True, max_events=_MAX_EVENTS), MemoryWatch()
    window = StepWindow(mode, skip=recipe.skip, steps=recipe.steps, show=line.show)
    with (
        line,
        _one_rank(recipe, world_size, folder) as notes,
        _axes_made() as made,
    ):
        succeeded = run_script(script, recipe.arguments, mode, watch, window)
    if not succeeded:
        steps = format_count(window.num_optimizer_steps, "optimizer step")
        failed = f"{script} failed after {steps}; nothing was locked."
        say(command, failed, *notes)
        return None
    window.refuse_if_empty()
    _compare_axes(recipe.mesh, axes, made)
    for text in watch.notes:
        mode.ledger.note(text)
    say(command, *notes, *_remarks(window, mode))
    return lock_ledger(mode.ledger, recipe, memory=watch.memory(), setup=window.setup)


def gpu_of_recipe(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What the options say about the GPU that a script is shown, for a recipe."""
    shown: dict[str, Any] = {"fake": True} if options.fake else {}
    if options.gpu is not None:
        shown["gpu"] = options.gpu
        if is_gpu_file(options.gpu):
            shown["gpu"] = Path(os.path.relpath(options.gpu, folder)).as_posix()
    if options.gpus_per_node is not None:
        shown["gpus_per_node"] = options.gpus_per_node
    return shown


def is_gpu_file(gpu: str) -> bool:
    """Whether ``--gpu`` has a path, and no name."""
    return gpu.endswith(".toml")


@contextlib.contextmanager
def _one_rank(recipe: Recipe, world_size: int, folder: Path) -> Iterator[list[str]]:
    """A simulated world without devices; gives what is to be said about it."""
    nodes = Nodes(recipe.gpus_per_node or GPUS_PER_NODE)
    world = World(world_size, recipe.rank, nodes)
    gpu = recipe.gpu
    if gpu is not None and is_gpu_file(gpu):
        gpu = str(folder / gpu)
    with (
        # A lock must not depend on the machine's devices.
        mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}),
        contextlib.redirect_stdout(sys.stderr),
        rehearsed_world(world, gpu)
        if recipe.fake
        else simulated_world(world_size, recipe.rank, use_gpu=False) as notes,
    ):
        yield notes


@contextlib.contextmanager
def _axes_made() -> Iterator[dict[str, set[int]]]:
    """Gives the axes of the meshes that are made."""
    made: dict[str, set[int]] = {}
    plain_mesh = DeviceMesh.__init__

    def build_mesh(mesh: Any, *args: Any, **kwargs: Any) -> None:
        plain_mesh(mesh, *args, **kwargs)
        for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False):
            made.setdefault(name, set()).add(size)

    with mock.patch.object(DeviceMesh, "__init__", build_mesh):
        yield made


def _compare_axes(text: str, axes: dict[str, int], made: dict[str, set[int]]) -> None:
    """The script makes its own mesh: it must be the one that the lock speaks of."""
    if not made:  # DDP and plain groups: the table shows them by their ranks
        return
    wrong = []
    for axis, size in axes.items():
        if axis not in made:
            wrong.append(f"the script made no axis {axis}")
        elif size not in made[axis]:
            sizes = " and ".join(map(str, sorted(made[axis])))
            wrong.append(f"its axis {axis} has {sizes} ranks, not {size}")
    extra = [f"it also made an axis {axis}" for axis in made if axis not in axes]
    if wrong:
        used = ",".join(f"{axis}={max(sizes)}" for axis, sizes in made.items())
        raise UsageError(
            f"--mesh {text} is not what the script used: {'; '.join(wrong + extra)}. Its "
            f"mesh was {used}."
        )
    for problem in extra:
        print(f"Note: the script's mesh: {problem}.", file=sys.stderr)


def _remarks(window: StepWindow, mode: CommDebugMode) -> Iterator[str]:
    """What the lock has, where that is not all steps that were asked for."""
    if window.setup is None:
        yield (
            "no module was called by itself; the lock has all that the script sent, and "
            "memory only as far as autograd saw it."
        )
    elif window.num_recorded == 0:
        yield (
            "no optimizer step was seen; the lock has the whole run from the first module "
            "call."
        )
    elif window.num_missing:
        yield (
            f"the script ended {window.num_missing} steps before all that --steps asks "
            f"for were made; the lock has {window.num_recorded}."
        )
    checks = mode.ledger.total(check=True).count
    if checks:
        yield f"{checks} communications of run-time checks were left out."


def run(options: argparse.Namespace) -> int:
    """Simulate and write; 1 when the script fails."""
    folder = options.out.absolute().parent
    recipe = Recipe(
        Path(os.path.relpath(options.script, folder)).as_posix(),
        options.mesh.replace(" ", ""),
        options.rank,
        options.steps,
        options.skip,
        tuple(options.arguments),
        **gpu_of_recipe(options, folder),
    )
    lock = simulate(recipe, folder, "lock")
    if lock is None:
        return 1
    save_lock(lock, options.out)
    total = lock.total()
    print(
        f"{options.out}: {format_count(total.count, 'communication')}, "
        f"{format_bytes(total.payload_bytes)} payload, {len(lock.rows)} "
        f"row{'' if len(lock.rows) == 1 else 's'}."
    )
    return 0
