"""``check_parity``: the public way in."""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchspmd.errors import ParityError, UsageError
from torchspmd.testing import Ranks
from torchspmd.verify.parity.compare import Asked, compare_recordings
from torchspmd.verify.parity.limits import explain_memory, is_out_of_memory
from torchspmd.verify.parity.request import Request, build_job
from torchspmd.verify.parity.run import Job, Split, run_rank, run_reference
from torchspmd.verify.parity.verdict import Verdict
from torchspmd.verify.recording.files import are_equal

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
    split: Split | None = None,
    loss_reduction: Literal["mean", "sum"] = "mean",
    compile: bool | Mapping[str, Any] = False,
    steps: int = 3,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    tolerance: Asked = None,
    without_grad: Sequence[str] = (),
    ranks: Ranks | None = None,
    timeout: float = 300.0,
    save: str | Path | None = None,
    raises: bool = True,
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
        split: ``split(batch, mesh)`` gives a rank's batch, where rows are not all.
        loss_reduction: How the losses along the data axes make the whole one.
        compile: Run the step through ``torchspmd.compile``: True, or its arguments.
            ``{"mesh": "dp"}`` names an axis.
        steps: How many; two or more show lost updates and stale weights.
        seed: For the model, and for each step.
        dtype: Convert the model and the batch; ``torch.float64`` leaves rounding no room.
        tolerance: A number, relative to each tensor's size; ``"bitwise"``; by default
            chosen from dtype and depth.
        without_grad: Patterns of parameters that are meant to get no gradient.
        ranks: Running ranks to use; by default new ones are started.
        timeout: Seconds that the ranks may take.
        save: Keep both recordings in this folder, as ``one`` and ``many``.
        raises: False returns a failed verdict instead of raising it.

    Returns:
        The verdict: ``print(verdict)``, ``verdict.first``, ``bool(verdict)``.

    Raises:
        ParityError: The runs differ, or their agreement means nothing; ``error.verdict``.
        UsageError: The check cannot be made: a function that cannot travel, a batch that
            cannot be split, a step that is not deterministic, too many ranks.
        RankError: The parallel run failed; the text has the rank's own traceback.
    """
    request = Request(world_size, mesh, data_axes, steps, ranks)
    job = build_job(
        request,
        build_model=build_model,
        step=step,
        batch=batch,
        parallelize=parallelize,
        optimizer=optimizer,
        split=split,
        loss_reduction=loss_reduction,
        compile=compile,
        dtype=dtype,
        seed=seed,
    )
    with _folder(save) as folder:
        verdict = _check(job, folder, ranks, timeout, tolerance, tuple(without_grad))
    if raises and not verdict:
        error = ParityError(str(verdict))
        error.verdict = verdict
        raise error
    return verdict


def _check(
    job: Job,
    folder: Path,
    ranks: Ranks | None,
    timeout: float,
    tolerance: Asked,
    without_grad: tuple[str, ...],
) -> Verdict:
    one, again, many = (folder / name for name in ("one", "again", "many"))
    _run_on_one_device(job, one)
    _run_on_one_device(job, again)
    _refuse_randomness(one, again)
    with (
        Ranks(job.world_size)
        if ranks is None
        else contextlib.nullcontext(ranks) as running
    ):
        running.run(run_rank, job, str(many), timeout=timeout)
    return compare_recordings(one, many, tolerance=tolerance, without_grad=without_grad)


def _run_on_one_device(job: Job, folder: Path) -> None:
    try:
        run_reference(job, str(folder))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError(explain_memory(error)) from error


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
def _folder(save: str | Path | None) -> Iterator[Path]:
    if save is not None:
        yield Path(save)
        return
    with tempfile.TemporaryDirectory(prefix="torchspmd-parity-") as name:
        yield Path(name)
