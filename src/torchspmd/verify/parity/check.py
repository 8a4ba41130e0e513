"""``check_parity``: run a step on ranks and on one device, and compare them."""

import contextlib
import functools
import math
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchspmd import _torch
from torchspmd.errors import ParityError, UsageError, WorldError
from torchspmd.testing import Ranks
from torchspmd.verify.parity.compare import Asked, compare_recordings
from torchspmd.verify.parity.run import (
    DOES_NOT_FIT,
    Job,
    RunOptions,
    explain_world,
    is_out_of_memory,
    run_rank,
    run_reference,
)
from torchspmd.verify.parity.verdict import Verdict
from torchspmd.verify.recording.files import are_equal

# Axes whose ranks get different rows by default.
DATA_AXES = frozenset(
    ("dp", "ddp", "fsdp", "data", "dp_replicate", "dp_shard", "replicate")
)

sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def check_parity(  # noqa: PLR0913 - what to run, how it is spread, how it is judged
    build_model: Callable[[], nn.Module],
    step: Callable[..., Any],
    batch: Any,
    *,
    parallelize: Callable[..., Any] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    world_size: int | None = None,
    mesh: Mapping[str, int] | None = None,
    data_axes: Sequence[str] | None = None,
    compile: bool | Mapping[str, Any] = False,
    steps: int = 3,
    dtype: torch.dtype | None = None,
    tolerance: Asked = None,
    without_grad: Sequence[str] = (),
    ranks: Ranks | None = None,
    raises: bool = True,
    run: RunOptions = RunOptions(),  # noqa: B008 - a frozen value
) -> Verdict:
    """Run a training step on real ranks and on one device, and compare everything.

    Loss, outputs, the gradient of every parameter, every updated parameter, buffers and
    optimizer state are compared after each step. Where they differ, the verdict names the
    first module whose activation or gradient differs, in the order of execution, by how
    much, on which ranks, and the likely cause. An agreement that means nothing (zero
    gradients, a flat loss, ...) is a failure too. ``docs/parity.md`` has the rules.

    Functions are sent to the ranks by name: define them at module level.

    Args:
        build_model: Makes the model; called under the same seed everywhere.
        step: ``step(model, optim, batch)``, a whole training step that returns the loss,
            ``(loss, outputs)`` or a dict with ``"loss"``; or ``step(model, batch)``,
            which returns the same and leaves backward and update to the check.
        batch: The whole batch, tensors in any tree; or a function from the number of the
            step to it.
        parallelize: ``parallelize(model, mesh)``, which changes the model or returns
            another. Runs on the ranks only.
        optimizer: Makes the optimizer from a list of parameters; SGD with momentum.
        world_size: How many ranks; the size of ``mesh``, or 4.
        mesh: Names and sizes of the mesh axes, such as ``{"dp": 2, "tp": 2}``; by default
            one axis ``"ranks"``.
        data_axes: The axes over which rows of the batch are split. By default those named
            ``dp``, ``ddp``, ``fsdp``, ``data`` and the like; others get the whole batch.
        compile: Run the step through ``torchspmd.compile``: True, or its arguments.
            ``{"mesh": "dp"}`` names an axis.
        steps: How many; two or more show lost updates and stale weights.
        dtype: Convert the model and the batch; ``torch.float64`` leaves rounding no room.
        tolerance: A number, relative to each tensor's size; ``"bitwise"``; by default
            chosen from dtype and depth.
        without_grad: Patterns of parameters that are meant to get no gradient.
        ranks: Running ranks to use; by default new ones are started.
        raises: False returns a failed verdict instead of raising it.
        run: What is seldom changed: seed, timeout, another split of the batch, where to
            keep the recordings.

    Returns:
        The verdict: ``print(verdict)``, ``verdict.first``, ``bool(verdict)``.

    Raises:
        ParityError: The runs differ, or their agreement means nothing; ``error.verdict``.
        UsageError: The check cannot be made: a function that cannot travel, a batch that
            cannot be split, a step that is not deterministic, too many ranks.
        RankError: The parallel run failed; the text has the rank's own traceback.

    Example:
        A test file; ``pytest`` runs it::

            def build_model():
                return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

            def step(model, batch):
                return model(batch).square().mean()

            def parallelize(model, mesh):
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(model, mesh["tp"], plan)

            def test_parity():
                batch = torch.randn(4, 8)
                check_parity(
                    build_model, step, batch, parallelize=parallelize, mesh={"tp": 2}
                )
    """
    if dist.is_initialized():
        raise WorldError(
            "check_parity starts its own ranks, and this process has a process group "
            "already. In a job under torchrun use torchspmd.verify.record, and compare "
            "with `torchspmd parity`."
        )
    if mesh is None:
        known = 4 if ranks is None else ranks.world_size
        size = known if world_size is None else world_size
        mesh = {"dp" if compile else "ranks": size}
    if data_axes is None:
        data_axes = [name for name in mesh if name in DATA_AXES]
    job = Job(
        build_model=build_model,
        step=step,
        parallelize=parallelize,
        optimizer=optimizer,
        compile=compile,
        mesh=dict(mesh),
        data_axes=tuple(data_axes),
        device_type="cuda" if ranks and ranks.backend == "nccl" else "cpu",
        dtype=dtype,
        options=run,
    )
    problems = [*_world_problems(job, world_size, ranks), *pickling_problems(job.sent)]
    if steps < 1:
        problems.append(f"steps={steps}: at least one step is needed")
    if problems:
        raise UsageError("check_parity: " + "; ".join(problems) + ".")
    if ranks is None and (text := explain_world(job.world_size)):
        raise UsageError(text)
    job = replace(job, batches=_batches(job, batch, steps))
    with _folder(run.save) as folder:
        _record_both(job, folder, ranks)
        verdict = compare_recordings(
            folder / "one",
            folder / "many",
            tolerance=tolerance,
            without_grad=without_grad,
        )
    if raises and not verdict:
        error = ParityError(str(verdict))
        error.verdict = verdict
        raise error
    return verdict


# ----------------------------------------------------------------------------
# The arguments, judged before anything runs.


def _world_problems(job: Job, world_size: int | None, ranks: Ranks | None) -> list[str]:
    found = []
    mesh, size = dict(job.mesh), job.world_size
    if not mesh or any(not isinstance(n, int) or n < 1 for n in mesh.values()):
        found.append(f"mesh={mesh}: every axis needs at least one rank")
    elif world_size is not None and world_size != size:
        found.append(f"world_size={world_size}, but the mesh has {size} ranks")
    elif ranks is not None and ranks.world_size != size:
        found.append(f"ranks has {ranks.world_size} ranks, but the mesh has {size}")
    unknown = [axis for axis in job.data_axes if axis not in mesh]
    if unknown:
        found.append(
            f"data_axes={job.data_axes}: the mesh {mesh} has no axis "
            f"{', '.join(unknown)}"
        )
    return found


def pickling_problems(given: Mapping[str, Any]) -> list[str]:
    """Functions, by the argument's name, that pickle cannot send to another process."""
    found = []
    for name, value in given.items():
        try:
            pickle.dumps(value)
        except Exception:
            called = getattr(value, "__qualname__", type(value).__name__)
            found.append(
                f"{name} ({called}) cannot be sent to the ranks: define it with `def` at "
                "the top level of a module, or use functools.partial of such a function"
            )
    return found


def _batches(job: Job, batch: Any, steps: int) -> tuple[Any, ...]:
    is_function = callable(batch) and not isinstance(batch, torch.Tensor)
    whole = [batch(number) if is_function else batch for number in range(steps)]
    batches = [_converted(each, job.dtype, job.device_type) for each in whole]
    if job.options.split is None:
        _check_rows(batches[0], job.mesh, job.data_axes)
    return tuple(batches)


def _converted(batch: Any, dtype: torch.dtype | None, device: str) -> Any:
    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to(device, dtype if leaf.is_floating_point() else None)

    return _torch.map_tree(convert, batch)


def _check_rows(batch: Any, mesh: Mapping[str, int], axes: tuple[str, ...]) -> None:
    size = math.prod(mesh[axis] for axis in axes)
    uneven = {
        leaf.shape[0]
        for leaf in _torch.leaves_of(torch.Tensor, batch)
        if leaf.ndim and leaf.shape[0] % size
    }
    if uneven:
        raise UsageError(
            f"check_parity: a batch of {min(uneven)} rows cannot be split evenly over "
            f"{size} ranks of {' and '.join(map(repr, axes))}, and a mean over uneven "
            f"parts is another mean: give a multiple of {size} rows, or "
            "run=RunOptions(split=...)."
        )


# ----------------------------------------------------------------------------
# The two runs.


def _record_both(job: Job, folder: Path, ranks: Ranks | None) -> None:
    one, again, many = (folder / name for name in ("one", "again", "many"))
    _run_on_one_device(job, one)
    _run_on_one_device(job, again)
    _refuse_randomness(one, again)
    with (
        Ranks(job.world_size)
        if ranks is None
        else contextlib.nullcontext(ranks) as running
    ):
        running.run(run_rank, job, str(many), timeout=job.options.timeout)


def _run_on_one_device(job: Job, folder: Path) -> None:
    try:
        run_reference(job, str(folder))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__} in the reference run"
        raise UsageError(DOES_NOT_FIT.format(reason=reason)) from error


def _refuse_randomness(one: Path, again: Path) -> None:
    """Two runs on one device must be equal, or a difference on ranks means nothing."""
    if are_equal(one, again):
        return
    verdict = compare_recordings(one, again)
    if verdict.first is None:
        return
    what = f"{verdict.first.kind.value} {verdict.first.name!r}".removesuffix(" ''")
    raise UsageError(
        "check_parity: the step is not deterministic: two runs on one device with the "
        f"same seed differ, first in the {what} of step {verdict.first.step}. Draw random "
        "numbers from torch's default generator only, keep no state outside of the model "
        "and the optimizer, and read no clock."
    )


@contextlib.contextmanager
def _folder(save: str | os.PathLike[str] | None) -> Iterator[Path]:
    if save is not None:
        yield Path(save)
        return
    with tempfile.TemporaryDirectory(prefix="torchspmd-parity-") as name:
        yield Path(name)
