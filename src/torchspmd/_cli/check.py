"""``torchspmd check``: does a script still do what its lock says?"""

import argparse
import dataclasses
import os
import shlex
from pathlib import Path

from torchspmd._cli.lock import gpu_of_recipe, is_gpu_file, simulate
from torchspmd._cli.usage.common import fake_problems, refuse
from torchspmd.comm import format_bytes, format_count
from torchspmd.errors import UsageError
from torchspmd.verify.lock.changes import changes
from torchspmd.verify.lock.lockfile import Lock, Recipe, load_lock


def run(options: argparse.Namespace) -> int:
    """Simulate again and compare; 1 when something changed."""
    locked = load_lock(options.lock)
    recipe = locked.made_by
    if isinstance(recipe, str):
        raise UsageError(
            f"{options.lock} is the lock of a test, {recipe}: pytest compares it."
        )
    refuse(fake_problems(options, fake=options.fake or recipe.fake))
    folder = options.lock.absolute().parent
    recipe = dataclasses.replace(recipe, **gpu_of_recipe(options, folder))
    now = simulate(recipe, folder, "check")
    if now is None:
        return 1
    sentences = changes(locked, now)
    for sentence in sentences:
        print(sentence)
    _conclude(options.lock, locked, now, len(sentences))
    return 1 if sentences else 0


def _conclude(path: Path, locked: Lock, now: Lock, num_changes: int) -> None:
    assert isinstance(now.made_by, Recipe)
    if locked.torch != now.torch:
        print(f"The lock was made with torch {locked.torch}, this is {now.torch}.")
    if not num_changes:
        total = now.total()
        print(
            f"{path}: as locked, {format_count(total.count, 'communication')}, "
            f"{format_bytes(total.payload_bytes)} payload."
        )
        return
    plural = "" if num_changes == 1 else "s"
    print(f"{path}: {num_changes} change{plural}. To accept: {_command(path, now)}")


def _command(path: Path, lock: Lock) -> str:
    recipe = lock.made_by
    assert isinstance(recipe, Recipe)
    script = os.path.relpath(path.parent / recipe.script)
    words = ["torchspmd", "lock", script, "--mesh", recipe.mesh, "-o", str(path)]
    usual = {"rank": 0, "steps": 1, "skip": 0, "gpus_per_node": None}
    for name, value in usual.items():
        if getattr(recipe, name) != value:
            words += [f"--{name.replace('_', '-')}", str(getattr(recipe, name))]
    if recipe.fake:
        words.append("--fake")
    if recipe.gpu is not None:
        is_file = is_gpu_file(recipe.gpu)
        gpu = os.path.relpath(path.parent / recipe.gpu) if is_file else recipe.gpu
        words += ["--gpu", gpu]
    if recipe.arguments:
        words += ["--", *recipe.arguments]
    return shlex.join(words)
