"""The other ranks of a rehearsed world: process groups of any size that answer at once."""

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import device_mesh, distributed_c10d

from torchspmd import _torch
from torchspmd.errors import UsageError
from torchspmd.rehearse.nodes import Nodes
from torchspmd.rehearse.place import is_called_by_user
from torchspmd.rehearse.recorder import Recorder
from torchspmd.rehearse.store import OneRankStore

__all__ = [
    "EndOfWindow",
    "Mail",
    "NoMail",
    "World",
    "fake_groups",
    "fake_ranks",
    "object_collectives",
]

_MODULES = (dist, distributed_c10d, device_mesh)
# Methods of a process group that give a work to wait for; torch renames some of them.
_COLLECTIVES = """
allreduce allreduce_coalesced broadcast reduce _allgather_base allgather
allgather_coalesced allgather_into_tensor_coalesced _reduce_scatter_base reduce_scatter
reduce_scatter_tensor_coalesced alltoall_base alltoall gather scatter send recv
recv_anysource barrier all_gather_single all_gather_single_coalesced all_to_all_single
reduce_scatter_single reduce_scatter_single_coalesced
""".split()


@dataclass(frozen=True, slots=True)
class World:
    """Ranks, the one that is played, and which node each is on."""

    size: int
    rank: int
    nodes: Nodes = field(default_factory=Nodes)

    def environment(self) -> dict[str, str]:
        """What torchrun would set; nothing for a script that is run by itself."""
        if self.size == 1:
            return {}
        of_node = self.nodes.environment(self.rank, self.size)
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            **{name: str(value) for name, value in of_node.items()},
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "rehearsal",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }


class EndOfWindow(BaseException):
    """Ends the script: all that was asked for is recorded, or sent.

    Not an ``Exception``, so that the script's own error handling lets it pass.
    """


class Mail(Protocol):
    """Python objects from one rank to another."""

    def send(self, objects: list[Any], rank: int | None) -> None:
        """This rank sends them."""

    def receive(self, rank: int | None) -> list[Any]:
        """What that rank sends to this one."""


class NoMail:
    """No other rank is there to send anything."""

    def send(self, objects: list[Any], rank: int | None) -> None:
        """Nobody takes them."""

    def receive(self, rank: int | None) -> list[Any]:
        """Nothing comes."""
        sender = "another rank" if rank is None else f"rank {rank}"
        raise UsageError(
            f"recv_object_list: the objects would come from {sender}, and only one rank is "
            "rehearsed here. `torchspmd predict` rehearses the other one too."
        )


@contextlib.contextmanager
def fake_ranks(world: World, recorder: Recorder, mail: Mail) -> Iterator[None]:
    """``init_process_group`` gives a group of the world's size, whatever it is told."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, world.environment()))
        stack.enter_context(fake_groups(world))
        for owner, name, value in (*object_collectives(mail), *_works(recorder)):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_torch.ddp_on_fake_groups())
        stack.enter_context(_torch.ddp_without_values())
        stack.enter_context(_torch.own_chunks_only())
        stack.enter_context(_torch.optimizer_states_on_all_ranks())
        stack.enter_context(_torch.stages_like_this_one())
        stack.callback(_end)
        yield


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_groups(world: World) -> Iterator[None]:
    """Inside, every process group that code asks for answers at once.

    A script that starts the ranks of its node itself starts the one that is played.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, value in (*_groups(world), *_spawned(world)):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _groups(world: World) -> Iterator[tuple[Any, str, Any]]:
    store = OneRankStore(world.rank, world.size)
    _torch.fake_store()  # registers the backend
    for name in ("TCPStore", "FileStore", "HashStore"):
        yield dist, name, lambda *args, **kwargs: store
    plain_start, plain_new = dist.init_process_group, dist.new_group
    asked = "nccl"  # the backend, as far as the script knows
    asked_of: MutableMapping[Any, str] = weakref.WeakKeyDictionary()

    def start(backend: object = None, *args: object, **kwargs: object) -> None:
        nonlocal asked
        asked = "gloo" if backend == "gloo" else "nccl"
        # The script's backend, address and sizes would wait for ranks that never come.
        if not dist.is_initialized():
            plain_start(
                "fake",
                store=store,
                rank=world.rank,
                world_size=world.size,
            )

    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        known = {
            name: kwargs[name]
            for name in ("group_desc", "use_local_synchronization")
            if name in kwargs
        }
        group = plain_new(ranks, backend="fake", **known)
        if isinstance(group, dist.ProcessGroup):
            asked_of[group] = (
                "gloo" if backend == "gloo" else "nccl" if backend else asked
            )
        return group

    def monitored_barrier(*args: Any, **kwargs: Any) -> None:
        """Of gloo; torch asks for the backend before it calls anything."""

    for module in _MODULES:
        yield module, "init_process_group", start
        if hasattr(module, "new_group"):
            yield module, "new_group", new_group
        if hasattr(module, "monitored_barrier"):
            yield module, "monitored_barrier", monitored_barrier
    plain_backend = dist.get_backend

    def get_backend(group: Any = None) -> str:
        # A script may ask whether it is nccl; others have to know what it is.
        if is_called_by_user():
            return asked if group is None else asked_of.get(group, asked)
        return plain_backend(group)

    yield dist, "get_backend", get_backend
    yield dist, "is_nccl_available", lambda: True


class _Ended:
    """Processes that are over."""

    def join(self, *args: object, **kwargs: object) -> bool:
        """All of them have ended."""
        return True


def _spawned(world: World) -> Iterator[tuple[Any, str, Any]]:
    """``torch.multiprocessing.spawn`` calls its function here, as this rank."""
    of_node = world.nodes.environment(world.rank, world.size)
    ranks = of_node["LOCAL_WORLD_SIZE"]

    def spawn(
        fn: Callable[..., None],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> _Ended | None:
        if nprocs != ranks:
            raise UsageError(
                f"the script starts {nprocs} ranks on a node by itself "
                f"(torch.multiprocessing.spawn), and a node has {ranks} here. Give "
                f"--world-size {nprocs}, or for several nodes --gpus-per-node {nprocs}."
            )
        fn(of_node["LOCAL_RANK"], *args)
        return None if join else _Ended()

    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        yield module, "spawn", spawn
        yield module, "start_processes", spawn


def object_collectives(mail: Mail) -> Iterator[tuple[Any, str, Any]]:
    """What to replace so that objects of other ranks are as those of this one.

    Those that one rank sends to another are mail. Scripts and libraries call these with
    keywords: the names are those of torch.
    """

    def broadcast(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        """It has what it sends."""

    def all_gather(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather(
        obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def scatter(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if scatter_object_input_list:
            scatter_object_output_list[0] = scatter_object_input_list[0]

    def send(
        object_list: list[Any], dst: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        mail.send(object_list, dst)

    def receive(
        object_list: list[Any], src: int | None = None, *args: Any, **kwargs: Any
    ) -> int:
        object_list[:] = mail.receive(src)
        return -1 if src is None else src

    for module in (dist, distributed_c10d):
        yield module, "send_object_list", send
        yield module, "recv_object_list", receive
        yield module, "broadcast_object_list", broadcast
        yield module, "all_gather_object", all_gather
        yield module, "gather_object", gather
        yield module, "scatter_object_list", scatter


class _Issued(NamedTuple):
    """A communication that Python issued: its number, and what it writes."""

    number: int
    results: list[torch.Tensor]


_ByWork = MutableMapping[Any, _Issued]


def _works(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    """A work that Python waits for is a wait of the current stream.

    Whoever has the work in Python waits for it when it likes. Nobody does so at the end of
    backward, unless its future is handed on, as communication hooks do.
    """
    by_work: _ByWork = weakref.WeakKeyDictionary()

    def waiting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            issued = by_work.pop(work, None)
            if issued is not None:
                recorder.wait(issued.number)
            return plain(work, *args, **kwargs)

        return wait

    def handing_on(plain: Callable[..., Any]) -> Callable[..., Any]:
        def get_future(work: Any) -> Any:
            issued = by_work.get(work)
            if issued is None:
                return plain(work)
            recorder.pending.add(issued.number)
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result(issued.results)
            return done

        return get_future

    for kind in _torch.work_types():
        yield kind, "wait", waiting(vars(kind)["wait"])
        if "get_future" in vars(kind):
            yield kind, "get_future", handing_on(vars(kind)["get_future"])
    yield from _issued(recorder, by_work)


def _issued(recorder: Recorder, by_work: _ByWork) -> Iterator[tuple[Any, str, Any]]:
    """Collectives that Python issues, by their work."""

    def watched(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            before = recorder.last_comm
            recorder.reduction = _reduction((*args, *kwargs.values()))
            work = plain(group, *args, **kwargs)
            recorder.reduction = ""
            if recorder.last_comm != before and work is not None:
                results = list(_torch.leaves_of(torch.Tensor, args[:1]))
                by_work[work] = _Issued(recorder.last_comm, results)
                recorder.pending.discard(recorder.last_comm)
            return work

        return call

    for name in _COLLECTIVES:
        if hasattr(dist.ProcessGroup, name):
            yield (
                dist.ProcessGroup,
                name,
                watched(getattr(dist.ProcessGroup, name)),
            )


def _reduction(options: Iterable[Any]) -> str:
    """What ranks do with their values, in the words of functional collectives.

    The operator is given an object that Python cannot read.
    """
    for each in options:
        operation = getattr(each, "reduceOp", each)
        for name in ("SUM", "AVG", "MIN", "MAX", "BAND", "BOR"):
            if isinstance(operation, dist.ReduceOp) and (
                operation == getattr(dist.ReduceOp, name)
            ):
                return name.lower()
    return ""
