"""Ranks agree on what they will send before they send it.

Each rank posts its collective sequence in the store of the process group and reads the
others'. No collective is used for this: ranks that disagree could not complete one.
"""

import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.errors import AgreementError
from torchspmd.step.plans import Plan, differ_in_values_only, differences

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.2  # seconds between two looks at the store


def agree(
    plan: Plan,
    mesh: DeviceMesh,
    what: str,
    key: str,
    *,
    seconds: float,
    failures: str | None = None,
) -> None:
    """Compare a plan with those of all ranks of a mesh; raise on every rank if they differ.

    Args:
        plan: This rank's plan.
        mesh: The ranks that take part.
        what: Names the program in messages.
        key: Names the program in the store; the same on every rank, used once.
        seconds: How long to wait for the other ranks.
        failures: Where ranks post why they cannot come; see ``post_failure``.
    """
    ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return
    texts = gather(plan.to_json(), ranks, what, key, seconds=seconds, failures=failures)
    plans = {rank: Plan.from_json(text) for rank, text in texts.items()}
    problems = differences(plans)
    if problems:
        title, cure = _title_and_cure(plans)
        lines = "\n".join(f"  * {line}" for line in problems)
        raise AgreementError(f"compile: {title} ({what})\n\n{lines}\n\n{cure}")


def gather(
    text: str,
    ranks: Sequence[int],
    what: str,
    key: str,
    *,
    seconds: float,
    failures: str | None = None,
) -> dict[int, str]:
    """The texts of all ranks; raise where one does not come. Arguments as in ``agree``."""
    texts, missing = exchange(text, ranks, key, seconds=seconds, failures=failures)
    if missing:
        raise AgreementError(_why_missing(missing, what, seconds, failures))
    return texts


def post_failure(failures: str, error: BaseException) -> None:
    """Tell ranks that wait for this one under ``failures`` that it does not come."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    _torch.default_store().set(f"{failures}/{dist.get_rank()}", text)


def exchange(
    text: str,
    ranks: Sequence[int],
    key: str,
    *,
    seconds: float,
    failures: str | None = None,
) -> tuple[dict[int, str], list[int]]:
    """Post a text in the store and read those of other ranks.

    Args:
        text: What this rank posts.
        ranks: Whose texts to read.
        key: The same on every rank, used once.
        seconds: How long to wait for all of them.
        failures: Once a rank has posted there why it does not come, none is waited for.

    Returns:
        The texts by rank, and the ranks from which none came.
    """
    store = _torch.default_store()
    store.set(f"{key}/{dist.get_rank()}", text)
    end, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while missing := [rank for rank in ranks if not store.check([f"{key}/{rank}"])]:
        if failures and _read_failures(store, missing, failures):
            break
        if time.monotonic() > end:
            break
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    there = [rank for rank in ranks if rank not in missing]
    return {rank: store.get(f"{key}/{rank}").decode() for rank in there}, missing


def _read_failures(
    store: _torch.Store, ranks: Sequence[int], failures: str
) -> dict[int, str]:
    keys = {rank: f"{failures}/{rank}" for rank in ranks}
    return {
        rank: store.get(key).decode()
        for rank, key in keys.items()
        if store.check([key])
    }


def _why_missing(
    missing: Sequence[int], what: str, seconds: float, failures: str | None
) -> str:
    found = (
        _read_failures(_torch.default_store(), missing, failures) if failures else {}
    )
    if found:
        lines = "\n".join(f"  * rank {rank}: {text}" for rank, text in found.items())
        return (
            f"compile: {what} could not be made on every rank\n\n{lines}\n\n"
            "Nothing was run. Mend what failed there, and call the step on all ranks."
        )
    return (
        f"compile: {what} is captured here, but not on rank "
        f"{', '.join(map(str, missing))} after {seconds:g} s. Every rank must call the "
        "step with the same shapes, in the same order: another rank may be running a "
        "program that it has already, with a batch of another shape."
    )


def _title_and_cure(plans: dict[int, Plan]) -> tuple[str, str]:
    if differ_in_values_only(plans):
        return "ranks hold other values of the same tensors", (
            "Ranks train one model, each with all of these tensors or its rows of them: "
            "ranks that hold other values would mix two models.\nGive every rank the same "
            "seed before the model is built, load the same checkpoint, or broadcast from "
            "one rank first."
        )
    return "ranks would not run the same communication", (
        "Every rank must send the same sequence, or the step would hang.\n"
        "Give every rank batches of the same shape and the same step; with uneven "
        "batches, pad or drop the last one."
    )
