"""Where ranks meet while they make a program: none runs what another could not make.

They compare plans before anything is compiled, which takes minutes and not equally many on
all ranks, and wait for each other when it is. A rank that fails says so: the others are
told at once instead of waiting for it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.step.agreement import agree, gather, post_failure
from torchspmd.step.capture.progress import phase
from torchspmd.step.plans import Plan

PLAN_SECONDS = 300.0  # between the first rank that has captured a step and the last
READY_SECONDS = 1800.0  # the same for compiling it


@final
class Meeting:
    """The making of one program.

    Args:
        name: The step's name.
        key: Which step of that name it is, and how often it has tried.
        number: Which program of the step it is.
        mesh: The ranks that run it; None for a step of this rank alone.
    """

    def __init__(
        self, name: str, key: str, number: int, mesh: DeviceMesh | None
    ) -> None:
        self._what = f"program {number} of {name!r}"
        self._key = f"torchspmd/step/{name}/{key}/{number}"
        self._mesh = mesh

    def compare(self, plan: Plan, along: DeviceMesh | None = None) -> None:
        """Raise on every rank of the mesh, or of that one, unless all have this plan."""
        if (mesh := along or self._mesh) is not None:
            self._agree(plan, mesh, f"plan/{describe(mesh)}", PLAN_SECONDS)

    def wait_until_ready(self, peers: Sequence[int]) -> None:
        """Wait until all ranks can run the program; raise where one cannot.

        Args:
            peers: The ranks that the program communicates with, also along other axes
                than that of the mesh: it would hang without any of them.
        """
        if self._mesh is None or dist.get_backend() == "fake":
            return
        ranks = sorted({*map(int, self._mesh.mesh.flatten().tolist()), *peers})
        self._gather("", ranks, "ready", READY_SECONDS)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What runs inside makes the program; when it fails, ranks that wait are told."""
        token = _current.set(self)
        try:
            yield
        except BaseException as error:
            if self._mesh is not None and dist.get_backend() != "fake":
                with contextlib.suppress(RuntimeError):  # a store that is gone
                    post_failure(f"{self._key}/failed", error)
            raise
        finally:
            _current.reset(token)

    def share(self, text: str, stage: str) -> list[str]:
        """This text of every rank of the mesh and of those that the mesh is a part of."""
        if self._mesh is None or dist.get_backend() == "fake":
            return [text]
        ranks = _torch.root_ranks(self._mesh)
        return list(self._gather(text, ranks, stage, PLAN_SECONDS).values())

    def _gather(
        self, text: str, ranks: Sequence[int], stage: str, seconds: float
    ) -> dict[int, str]:
        with phase("waiting for all ranks"):
            return gather(
                text,
                ranks,
                self._what,
                f"{self._key}/{stage}",
                seconds=seconds,
                failures=f"{self._key}/failed",
            )

    def _agree(self, plan: Plan, mesh: DeviceMesh, stage: str, seconds: float) -> None:
        with phase("waiting for all ranks"):
            agree(
                plan,
                mesh,
                f"{self._what}, mesh {describe(mesh)}",
                f"{self._key}/{stage}",
                seconds=seconds,
                failures=f"{self._key}/failed",
            )


_current: ContextVar[Meeting | None] = ContextVar("meeting", default=None)


def share(text: str, stage: str) -> list[str]:
    """The texts of all ranks that make the program under way; outside of one, this."""
    meeting = _current.get()
    return [text] if meeting is None else meeting.share(text, stage)


def describe(mesh: DeviceMesh) -> str:
    """Its axes and their sizes."""
    names = mesh.mesh_dim_names or tuple(f"axis{n}" for n in range(mesh.ndim))
    return ", ".join(f"{n}={s}" for n, s in zip(names, mesh.shape, strict=True))
