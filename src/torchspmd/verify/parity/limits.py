"""What this machine can hold: one model on one device, and how many ranks."""

import contextlib
import os
from pathlib import Path

_RANK_BYTES = 400 << 20  # a process with torch loaded, and room for a small model
_DOES_NOT_FIT = (
    "check_parity: the model does not fit one device ({reason}): check a smaller "
    "configuration of it (fewer layers, the same widths), or record two parallel layouts "
    "with torchspmd.verify.record and compare those with `torchspmd parity a b`."
)
_RANKS_PER_CORE = 16  # more only wait for each other


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the host or on a device."""
    text = str(error).lower()
    words = ("can't allocate memory", "out of memory", "cannot allocate memory")
    return isinstance(error, MemoryError) or any(word in text for word in words)


def explain_memory(error: BaseException) -> str:
    """One sentence on a model that one device cannot hold."""
    return _DOES_NOT_FIT.format(reason=f"{type(error).__name__} in the reference run")


def explain_size(parameter_bytes: int, world_size: int) -> str | None:
    """One sentence on a model too large to train here; None if there is room for it.

    One device holds parameters, gradients and up to two states; every rank builds the
    whole model before it is laid out.
    """
    free = free_bytes()
    needed = parameter_bytes * max(4, world_size)
    if free is None or needed <= free:
        return None
    reason = (
        f"{parameter_bytes / 2**30:.3g} GiB of parameters, {free / 2**30:.3g} GiB free"
    )
    return _DOES_NOT_FIT.format(reason=reason)


def explain_world(world_size: int) -> str | None:
    """One sentence on a world that is too large for this machine; None if it is not."""
    cores = os.cpu_count() or 1
    free = free_bytes()
    by_memory = world_size if free is None else max(1, free // _RANK_BYTES)
    most = min(by_memory, max(8, _RANKS_PER_CORE * cores))
    if world_size <= most:
        return None
    room = "" if free is None else f" and {free / 2**30:.1f} GiB of free memory"
    return (
        f"check_parity: {world_size} ranks are too many for this machine, which has "
        f"{cores} cores{room}, and can run {most}: a bug of {world_size} ranks nearly "
        "always shows at 4, or with a mesh like {'dp': 2, 'tp': 2}."
    )


def free_bytes() -> int | None:
    """Memory that processes may still take; None where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
