"""Ranks agree on each program before they run it."""

import contextlib
import json
import re
import textwrap
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import zip_longest
from typing import final

import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.comm.exchange import Exchanged, exchange, post_failure
from torchspmd.errors import AgreementError
from torchspmd.layout.names import format_mesh
from torchspmd.step.graph.collectives import events_of
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.memory import ROLE_KEY
from torchspmd.step.graph.metadata import OutputKind, output_values, roles_of
from torchspmd.step.progress import logger, phase

# ----------------------------------------------------------------------------
# What ranks are about to run, as values that can be compared.

_SHOWN = 12  # differences in one message


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a rank.

    Attributes:
        text: Kind, dtype and shape.
        axis: What this rank calls the group. Ranks may know one group by several names.
        ranks: The members of the group.
        states: The states of the step that it sends, where it sends nothing else.
    """

    text: str
    axis: str
    ranks: tuple[int, ...]
    states: str = ""

    def __str__(self) -> str:
        what = f"{self.text} of {self.states}" if self.states else self.text
        return f"{what} over {self.axis} ({len(self.ranks)} ranks)"


@dataclass(frozen=True, slots=True)
class CommPlan:
    """What one rank is about to run.

    Attributes:
        collectives: Its collectives, in order.
        inputs: Its tensor arguments.
        values: Tensors that must be equal on all ranks, each with a checksum.
        deferred: What it leaves for the next step.
        updates: Its states and gradients that follow from what was sent, each with the
            collectives that it follows from.
    """

    collectives: tuple[Collective, ...] = ()
    inputs: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()

    @property
    def ranks(self) -> set[int]:
        """The ranks that it communicates with."""
        return {rank for each in self.collectives for rank in each.ranks}

    @property
    def sent(self) -> "CommPlan":
        """What other ranks see of it: not the shapes of arguments, nor values."""
        return replace(self, inputs=(), values=())

    def to_json(self) -> str:
        """The plan as it travels."""
        return json.dumps(astuple(self))

    @classmethod
    def from_json(cls, text: str) -> "CommPlan":
        """The plan that ``to_json`` made a text of."""
        collectives, *others = json.loads(text)
        sent = tuple(Collective(a, b, tuple(c), d) for a, b, c, d in collectives)
        return cls(sent, *map(tuple, others))


def build_comm_plan(
    graph: fx.GraphModule,
    inputs: Sequence[str],
    values: Sequence[str] = (),
    deferred: Sequence[str] = (),
) -> CommPlan:
    """The plan of a graph; see ``CommPlan`` for the other arguments."""
    states = _states_behind(graph.graph)
    sent = tuple(
        Collective(
            f"{event.kind.value} {event.dtype}{list(event.shape)}" + _reduction(node),
            event.axis,
            event.group.ranks,
            states.get(node, ""),
        )
        for node, event in events_of(graph.graph)
    )
    updates = tuple(_updates(graph.graph))
    return CommPlan(sent, tuple(inputs), tuple(values), tuple(deferred), updates)


def _reduction(node: fx.Node) -> str:
    return f" ({node.args[1]})" if isinstance(node.args[1], str) else ""


# Which parameter is sent: layers of one shape send the same kind, dtype and shape.


def _states_behind(graph: fx.Graph) -> dict[fx.Node, str]:
    """Of each collective that sends nothing but states of the step: which ones."""
    inputs = graph.find_nodes(op="placeholder")
    others = sum(
        1 << place
        for place, node in enumerate(inputs)
        if node.meta.get(ROLE_KEY) in (None, "input")
    )
    behind = _bits_behind(graph, inputs)
    return {
        node: ", ".join(
            _held_by(inputs[place])
            for first, end in _runs(behind[node])
            for place in range(first, end)
        )
        for node, _ in events_of(graph)
        if not behind[node] & others
    }


def _updates(graph: fx.Graph) -> Iterator[str]:
    """What the step writes, by name, and the collectives that it follows from."""
    behind = _bits_behind(graph, [node for node, _ in events_of(graph)])
    inputs = graph.find_nodes(op="placeholder")
    outputs = zip(output_values(graph), roles_of(graph), strict=True)
    for place, (value, role) in enumerate(outputs):
        if not isinstance(value, fx.Node) or not behind[value]:
            continue
        name = f"output {place}"
        if role.placeholder >= 0:
            name = _held_by(inputs[role.placeholder])
            if role.kind is not OutputKind.STATE:
                name = f"{role.kind.value} of {name}"
        yield f"{name} from collective {_numbers(behind[value])}"


def _held_by(node: fx.Node) -> str:
    """The tensor that goes in: its name is equal on all ranks and in all programs."""
    return str(node.meta.get("torchspmd_name", node.name))


def _bits_behind(graph: fx.Graph, numbered: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each node, a bit for each of the numbered ones that it is or depends on."""
    bits = {node: 1 << place for place, node in enumerate(numbered)}
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        found[node] = bits.get(node, 0)
        for source in node.all_input_nodes:
            found[node] |= found[source]
    return found


def _runs(bits: int) -> list[tuple[int, int]]:
    """The first and the end of each run of set bits."""
    return [run.span() for run in re.finditer("1+", f"{bits:b}"[::-1])]


def _numbers(bits: int) -> str:
    """The places of set bits as text.

    >>> _numbers(0b100111)
    '0-2, 5'
    """
    return ", ".join(
        f"{first}-{end - 1}" if end - first > 1 else str(first)
        for first, end in _runs(bits)
    )


def differences(plans: Mapping[int, CommPlan]) -> list[str]:
    """One line for each rank and place where a plan does not go with the others.

    >>> four = Collective("all_reduce float32[4]", "dp", (0, 1))
    >>> five = Collective("all_reduce float32[5]", "dp", (0, 1))
    >>> differences({0: CommPlan((four,)), 1: CommPlan((five,))})[0][:65]
    'collective 0: rank 0 has all_reduce float32[4] over dp (2 ranks),'
    >>> differences({0: CommPlan((four,)), 1: CommPlan((replace(four, axis="data"),))})
    []
    """
    lines = [line for rank in plans for line in _compare(plans, rank)]
    lines = lines or list(_compare_groups(plans))
    rest = len(lines) - _SHOWN
    return lines if rest <= 0 else [*lines[:_SHOWN], f"and {rest} more differences"]


def differ_in_values_only(plans: Mapping[int, CommPlan]) -> bool:
    """Whether ranks run the same, on tensors that should be equal and are not."""
    return not differences({r: replace(plan, values=()) for r, plan in plans.items()})


def _compare(plans: Mapping[int, CommPlan], rank: int) -> Iterator[str]:
    """How a rank's plan differs from that of the first rank."""
    first, reference = next(iter(plans.items()))
    plan = plans[rank]
    for name, ours, theirs in (
        ("tensor argument", reference.inputs, plan.inputs),
        ("collective", reference.collectives, plan.collectives),
        ("values", reference.values, plan.values),
        ("deferred", reference.deferred, plan.deferred),
        ("update", reference.updates, plan.updates),
    ):
        for place, (a, b) in enumerate(zip_longest(ours, theirs)):
            if _essence(a) != _essence(b):
                yield (
                    f"{name} {place}: rank {first} has {a or 'none'}, rank {rank} has "
                    f"{b or 'none'}"
                )


def _essence(item: object) -> object:
    """What must be equal on ranks whose groups have other members and other names."""
    if isinstance(item, Collective):
        return item.text, item.states, len(item.ranks)
    return item


def _compare_groups(plans: Mapping[int, CommPlan]) -> Iterator[str]:
    """Where a rank counts on another one that sends to other ranks at that place."""
    for place in range(min(len(plan.collectives) for plan in plans.values())):
        sends = {rank: plan.collectives[place] for rank, plan in plans.items()}
        senders: dict[tuple[int, ...], set[int]] = {}
        for rank, collective in sends.items():
            senders.setdefault(collective.ranks, set()).add(rank)
        for members, there in senders.items():
            for absent in sorted({*members} & {*plans} - there):
                one = min(there)
                yield (
                    f"collective {place}: rank {one} has {sends[one]}, namely "
                    f"{list(members)}, rank {absent} has it over "
                    f"{list(sends[absent].ranks)}"
                )


# ----------------------------------------------------------------------------
# Ranks agree on what they will send before they send it.

PLAN_SECONDS = 300.0  # between the first rank that has captured a step and the last
READY_SECONDS = 1800.0  # the same for compiling it

_SAME_CALLS = (
    "Every rank must call the step with the same arguments, in the same order: another "
    "rank may be running a program that it has already. Only in the modes 'replicate' and "
    "'fully_shard' ranks may have batches of other shapes, as long as what they send does "
    "not depend on them."
)


def exchange_texts(
    text: str, ranks: Sequence[int], key: str, seconds: float, failures: str = ""
) -> Exchanged:
    """``comm.exchange`` in the store of the process group."""
    store, rank = _torch.default_store(), dist.get_rank()
    return exchange(store, rank, text, ranks, key, seconds, failures)


@final
class Agreement:
    """The ranks that build one program together.

    They compare what they will send before anything is compiled, which takes minutes and
    not equally many on all ranks, and wait for each other when it is. A rank that fails
    says so: the others are told at once instead of waiting for it.

    Args:
        name: The step's name.
        key: Which step of that name it is, and how often it has tried.
        number: Which program of the step it is.
        mesh: The ranks that run it; None for a step of this rank alone.
        call: For which call of the step.
        reason: Why it is needed.

    Attributes:
        is_used: Whether other ranks were asked or told anything.
        measured: The rates that all ranks have measured together, and lines about them:
            once, also where the program is then built anew for one size.
    """

    def __init__(
        self,
        name: str,
        key: str,
        number: int,
        mesh: DeviceMesh | None,
        *,
        call: int = 0,
        reason: str = "",
    ) -> None:
        self._what = f"program {number} of {name!r}"
        self._key = key_of_program(name, key, number)
        self._call, self._reason = call, reason
        is_alone = mesh is None or dist.get_backend() == "fake"
        self._mesh = None if is_alone else mesh
        self.is_used = False
        self.measured: tuple[CostModel, tuple[str, ...]] | None = None

    def compare(self, plan: CommPlan, along: DeviceMesh | None = None) -> None:
        """Raise on every rank of the mesh, or of that one, unless all have this plan."""
        if self._mesh is None:
            return
        self.is_used = True  # also where the data axis is of one rank: others may wait
        mesh = along or self._mesh
        what = f"{self._what}, mesh {format_mesh(mesh)}"
        ranks = _ranks_of(mesh)
        if len(ranks) == 1:
            return
        stage = f"plan/{format_mesh(mesh)}"
        texts = self._gather(plan.to_json(), ranks, what, stage, PLAN_SECONDS)
        plans = {rank: CommPlan.from_json(text) for rank, text in texts.items()}
        if problems := differences(plans):
            title, cure = _title_and_cure(plans)
            lines = "\n".join(f"  * {line}" for line in problems)
            raise AgreementError(f"compile: {title} ({what})\n\n{lines}\n\n{cure}")

    def wait_until_ready(self, peers: Collection[int]) -> None:
        """Wait until all ranks can run the program; raise where one cannot.

        Args:
            peers: The ranks that the program communicates with, also along other axes
                than that of the mesh: it would hang without any of them.
        """
        if self._mesh is not None:
            ranks = sorted({*_ranks_of(self._mesh), *peers})
            self._gather("", ranks, self._what, "ready", READY_SECONDS)

    def share(self, text: str, stage: str, seconds: float | None = None) -> list[str]:
        """This text of every rank of the mesh and of those that the mesh is a part of."""
        if self._mesh is None:
            return [text]
        ranks = _torch.root_ranks(self._mesh)
        seconds = PLAN_SECONDS if seconds is None else seconds
        texts = self._gather(text, ranks, self._what, stage, seconds)
        return list(texts.values())

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Tell ranks that wait for this one when building the program fails inside."""
        try:
            yield
        except BaseException as error:
            if self._mesh is not None:
                self.is_used = True
                with contextlib.suppress(RuntimeError):  # a store that is gone
                    store, rank = _torch.default_store(), dist.get_rank()
                    post_failure(store, rank, f"{self._key}/failed", error)
            raise

    def _gather(
        self, text: str, ranks: Sequence[int], what: str, stage: str, seconds: float
    ) -> Mapping[int, str]:
        self.is_used = True
        _post_begun(self._key, self._call, self._reason)
        with phase("waiting for all ranks"):
            found = exchange_texts(
                text, ranks, f"{self._key}/{stage}", seconds, f"{self._key}/failed"
            )
        if found.failures:
            failed = found.failures.items()
            if any(text.startswith(_ALONE) for _, text in failed):
                raise AgreementError(_alone(self._what, dist.get_rank(), self._reason))
            lines = "\n".join(f"  * rank {rank}: {text}" for rank, text in failed)
            raise AgreementError(
                f"compile: {what} could not be built on every rank\n\n{lines}\n\n"
                "Nothing was run. Fix what failed there, and call the step on all ranks."
            )
        here = f"compile: {what} is captured here"
        if found.missing and self._reason:
            here = f"{here}, because it {self._reason}\n\nThere"
        return found.require_all(here, _SAME_CALLS)


def key_of_program(name: str, key: str, number: int) -> str:
    """Under which key ranks speak about a program that they build."""
    return f"torchspmd/step/{name}/{key}/{number}"


def is_real_group() -> bool:
    """Whether there are other ranks that could be told anything."""
    return dist.is_initialized() and dist.get_backend() != "fake"


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def _unnamed(plan: CommPlan) -> CommPlan:
    """A plan without the names of what is sent."""
    sent = tuple(replace(each, states="") for each in plan.collectives)
    return replace(plan, collectives=sent, updates=())


def _title_and_cure(plans: dict[int, CommPlan]) -> tuple[str, str]:
    if differ_in_values_only(plans):
        return "ranks hold other values of the same tensors", (
            "Ranks train one model, each with all of these tensors or its rows of them: "
            "ranks that hold other values would mix two models.\nGive every rank the same "
            "seed before the model is built, load the same checkpoint, or broadcast from "
            "one rank first."
        )
    if not differences({rank: _unnamed(plan) for rank, plan in plans.items()}):
        return "ranks would send different parameters to each other", (
            "What ranks send fits by shape, but belongs to other parameters on each of "
            "them.\nEvery rank must use the same parameters in the same order: choose a "
            "layer by data with torch.where, or add 0 times the output of the others, "
            "instead of a choice by rank."
        )
    return "ranks would not run the same communication", (
        "Every rank must send the same sequence, or the step would hang.\n"
        "Give every rank batches of the same shape and the same step; with uneven "
        "batches, pad or drop the last one."
    )


def share_shapes(
    ranks: Agreement,
    shapes: Mapping[str, tuple[int, ...]],
    dims: Mapping[str, frozenset[int]],
) -> tuple[dict[str, tuple[int, ...]], dict[str, frozenset[int]]]:
    """The first rank's shapes, and the dims that differ on any rank or may do so.

    All ranks then choose by the same shapes, whatever their own batches are.
    """
    own = [shapes, {name: sorted(each) for name, each in dims.items()}]
    told = [json.loads(text) for text in ranks.share(json.dumps(own), "shapes")]
    first = {name: tuple(shape) for name, shape in told[0][0].items()}
    found: dict[str, frozenset[int]] = {}
    for other, known in told:
        for name, each in known.items():
            found[name] = found.get(name, frozenset()).union(each)
        for name, shape in other.items():
            if len(shape) != len(first.get(name, ())):
                continue
            differing = frozenset(
                dim
                for dim, (a, b) in enumerate(zip(first[name], shape, strict=True))
                if a != b
            )
            if differing:
                found[name] = found.get(name, frozenset()) | differing
    return first, found


# ----------------------------------------------------------------------------
# A rank that captures anew alone, because a value has changed there and nowhere else.
#
# The others run the program of before, and wait in a collective for what never comes. No
# call asks the store for that. A thread looks there when one call takes long, tells the
# rank that it is alone, and its own what went wrong, for when the collective ends.

LONG_SECONDS = 5.0  # of a call, from which on it may wait for a rank that captures
_ALONE = "runs a program of before"


def _post_begun(key: str, call: int, reason: str) -> None:
    """Tell ranks that run another program in the same call what is captured here."""
    text = json.dumps((call, reason))
    _torch.default_store().set(f"{key}/begun/{dist.get_rank()}", text)


def _alone(what: str, rank: int, reason: str) -> str:
    lines = textwrap.indent(reason, "  ")
    return (
        f"compile: {what} is captured by rank {rank} alone, while other ranks run the "
        f"program of before in the same call\n\n{lines}\n\nWhat the step's Python reads "
        "must change on all ranks before the same call. Change it on all of them, or pass "
        "it as a tensor or a float argument. The other ranks wait in a collective until "
        "this one makes the call with the value of before, or the job ends."
    )


@final
class Calls:
    """The running call of a step, as the thread sees it that looks after long ones.

    Args:
        name: The step's name.

    Attributes:
        num_told: How many tries of other ranks to build a program have failed here.
    """

    def __init__(self, name: str) -> None:
        self._name, self.num_told = name, 0
        # Its number, the ranks that it communicates with, where these would speak about
        # another program, which one that is, and since when it runs.
        self._running: tuple[int, Collection[int], str, int, float] | None = None
        self._error = ""

    def begin(self, call: int, ranks: Collection[int], key: str, number: int) -> None:
        """A call begins that communicates with these ranks."""
        if not _watched:
            _start_watching()
        _watched.add(self)
        self._error = ""
        self._running = call, ranks, key, number, time.monotonic()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise what the thread has found, where a collective fails inside."""
        try:
            yield
        except Exception as error:
            self.look(wait=0.0)
            if self._error:
                raise AgreementError(self._error) from error
            raise
        finally:
            self._running = None

    def look(self, wait: float) -> None:
        """Look for a rank that captures another program for the running call."""
        if (running := self._running) is None:
            return
        call, ranks, key, number, since = running
        if self._error or time.monotonic() - since < wait:
            return
        store, own = _torch.default_store(), dist.get_rank()
        for rank in sorted({*ranks} - {own}):
            if not store.check([f"{key}/begun/{rank}"]):
                continue
            theirs, reason = json.loads(store.get(f"{key}/begun/{rank}"))
            if theirs <= call:
                what = f"program {number} of {self._name!r}"
                self._error, self.num_told = (
                    _alone(what, rank, reason),
                    self.num_told + 1,
                )
                store.set(f"{key}/failed/{own}", _ALONE)
                logger.error("%s", self._error)
                return


_watched: weakref.WeakSet[Calls] = weakref.WeakSet()


def _start_watching() -> None:
    def watch() -> None:
        while True:
            time.sleep(LONG_SECONDS / 4)
            with contextlib.suppress(Exception):  # a process group that is gone
                for each in list(_watched):
                    each.look(LONG_SECONDS)

    threading.Thread(target=watch, name="torchspmd-calls", daemon=True).start()


# ----------------------------------------------------------------------------
# Ranks that go back to another program do so together.
#
# Programs are compared when they are made. A rank that has several may run one while
# another rank runs the next: that is harmless where both send the same for the same states,
# as for batches of other shapes whose gradients are reduced. Otherwise ranks would take
# each other's bytes for something else, or wait for what never comes.

SWITCH_SECONDS = 600.0  # between the first rank that takes up a program and the last
_SAME_BATCHES = (
    "Give every rank batches of the same shape, and the same other arguments, in every "
    "step; with uneven batches, pad or drop the last one."
)


@final
class Switches:
    """Which of the programs that communicate a step ran last.

    What is decided here depends on programs that all ranks have built together, so that
    ranks which call the same steps exchange numbers at the same calls.

    Args:
        name: The step's name.
        key: Which step of that name it is.
    """

    def __init__(self, name: str, key: str) -> None:
        self._what = f"compile on {name!r}"
        self._key = f"torchspmd/step/{name}/{key}/switch"
        self._plans: dict[int, CommPlan] = {}  # by number
        self._latest: int | None = None
        self._count = 0

    def to_new(self, number: int, plan: CommPlan) -> None:
        """Ranks have just built a program together: its number, and what it sends."""
        if plan.collectives:
            self._plans[number], self._latest = plan, number

    def to_known(self, number: int, plan: CommPlan) -> None:
        """Raise unless all ranks that it communicates with take up this program as well.

        One that sends nothing may come between: steps for micro-batches take turns.
        """
        if number == self._latest or not plan.collectives:
            return
        latest = None if self._latest is None else self._plans[self._latest]
        self._latest = None  # after a failure ranks synchronise again
        if latest != self._plans[number]:
            self._synchronise(number, plan)
        self._latest = number

    def _synchronise(self, number: int, plan: CommPlan) -> None:
        self._count += 1
        if not is_real_group():
            return
        ranks = sorted({dist.get_rank(), *plan.ranks})
        key = f"{self._key}/{self._count}"
        found = exchange_texts(str(number), ranks, key, SWITCH_SECONDS)
        # Whoever came to this switch has read all that was posted for the last but one.
        old = f"{self._key}/{self._count - 2}/{dist.get_rank()}"
        _torch.default_store().delete_key(old)
        numbers = found.require_all(
            f"{self._what}, back to program {number}",
            f"Ranks may run programs that do not send the same. {_SAME_BATCHES}",
        )
        if set(numbers.values()) == {str(number)}:
            return
        told = [f"rank {rank} runs program {n}" for rank, n in sorted(numbers.items())]
        lines = "\n".join(f"  * {line}" for line in told)
        raise AgreementError(
            f"{self._what}: ranks would run programs that do not send the same.\n\n{lines}"
            f"\n\n{_SAME_BATCHES}"
        )
