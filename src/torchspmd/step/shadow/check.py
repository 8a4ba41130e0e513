"""When calls of a compiled step are made eagerly too, and what ranks say about them."""

import contextlib
import functools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchspmd import _torch
from torchspmd.comm import format_count
from torchspmd.comm.exchange import post_failure
from torchspmd.errors import ShadowError, ShadowWarning
from torchspmd.layout.rounding import Tolerance
from torchspmd.step.capture.inventory import Inventory, Role
from torchspmd.step.capture.parallel_mode import ParallelMode
from torchspmd.step.capture.rank_divergence import checksum_parameters, checksums
from torchspmd.step.flush_hooks import without_flushing, without_flushing_in_backward
from torchspmd.step.graph.collectives import peers_of
from torchspmd.step.modes.fully_shard import FullySharded
from torchspmd.step.modes.global_batch import GlobalBatch
from torchspmd.step.program import Program
from torchspmd.step.progress import phase
from torchspmd.step.rank_agreement import exchange_texts
from torchspmd.step.shadow.compare import (
    Amplified,
    Difference,
    Evidence,
    Outcome,
    Rounding,
    compare_returned,
    compare_values,
    has_same_kernels,
    likely_cause,
    own_rows,
    tolerance_of,
)
from torchspmd.step.shadow.copies import free_bytes, needed_bytes
from torchspmd.step.shadow.eager import (
    Eager,
    Generators,
    Kind,
    Way,
    draws,
    find_following,
    run_eagerly,
)

BY_DEFAULT = 3  # calls after each capture
# Environment variables: "1" for every call; how many, where compile does not say.
EVERY_CALL, NUMBER = "TORCHSPMD_CHECK", "TORCHSPMD_SHADOW"
_LONGEST_CHAIN = 8  # eager calls that build on each other while updates are pending
_SECONDS = 300.0  # for ranks to come
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class ShadowPlan:
    """Which calls are made eagerly too.

    Attributes:
        calls: How many after each capture; -1 for every call.
        every: After how many calls to begin again; 0 for never.
    """

    calls: int
    every: int = 0

    @classmethod
    def of(cls, shadow: int | None, every: int | None) -> "ShadowPlan":
        """What ``compile`` was given, or the environment says."""
        if shadow is None:
            if os.environ.get(EVERY_CALL) == "1":
                return cls(-1)
            shadow = int(os.environ.get(NUMBER, BY_DEFAULT))
        return cls(shadow, every or 0)


def wrong_environment() -> Iterator[str]:
    """What the environment says about it that cannot be."""
    given = os.environ.get(NUMBER, "0")
    if not given.isdecimal():
        yield f"compile: the environment has {NUMBER}={given!r}; set a number of calls."


class Skip(NamedTuple):
    """Why calls are not compared; ranks tell each other as JSON.

    Attributes:
        text: The reason, for ``explain``.
        warns: Whether a user expects the comparison and can have it: worth a warning.
    """

    text: str
    warns: bool = False


@dataclass(slots=True, repr=False)
class _Call:
    """A call that is also made eagerly, from its eager run to the comparison."""

    program: Program
    inventory: Inventory
    mode: ParallelMode
    eager: Eager
    generators: Generators
    tolerance: Tolerance
    number: int
    chained: int
    is_first: bool
    amplified: Amplified
    seconds: float
    void: Skip | None = None  # why nothing can be compared
    is_left: bool = False  # its update is pending now

    @property
    def rounding(self) -> Rounding:
        """How much counts as rounding."""
        following = find_following(self.program, self.inventory)
        return Rounding(
            self.tolerance, self.chained, self.eager, following, self.amplified
        )


@dataclass(slots=True, repr=False)
class Shadow:
    """The shadow steps of one compiled step.

    Args:
        name: The step's name.
        key: Which step of that name it is, the same on every rank.
        function: The step.
        plan: Which calls are made eagerly too.
        refusal: Why no call can be made eagerly; empty where that can be.
    """

    name: str
    key: str
    function: Callable[..., Any]
    plan: ShadowPlan
    refusal: str = ""
    _left: dict[bool, int] = field(default_factory=dict)  # by: does it communicate
    _calls: int = 0
    _made: int = 0
    _exchanged: int = 0
    _seconds: float = 0.0
    _largest: float = 0.0
    _noise: int = 0
    _compared: int = 0
    _captured: dict[int, dict[str, float]] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)  # programs
    _pending: _Call | None = None  # whose update the compiled step has not made yet
    _found: list[Difference] = field(default_factory=list)  # by a flush, not said yet
    _notes: dict[str, None] = field(default_factory=dict)
    _is_unmeasured: bool = False  # whether memory was short for a second eager call

    @property
    def _place(self) -> str:
        """Where ranks post for each other about this step."""
        return f"torchspmd/step/{self.name}/{self.key}/shadow"

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be done in a call, as in all steady ones."""
        return not any(self._left.values()) and self._pending is None

    def note_build(
        self, program: Program, inventory: Inventory, *, is_agreed: bool
    ) -> None:
        """A program was captured: its first calls are made eagerly too.

        Not where this rank has built it alone, for a batch of another size: others would
        not make their calls eagerly. What it sends is that of a program that was compared.
        """
        if self.plan.calls == 0 or self.refusal:
            return
        communicates = bool(len(program.ledger))
        if is_agreed or not communicates:
            self._left[communicates] = self.plan.calls
        self._captured[program.number] = _numbers(inventory)

    def begin_again(self, program: Program) -> None:
        """The other backend of a program takes its first turn: all ranks compare it."""
        communicates = bool(len(program.ledger))
        if communicates in self._left:
            self._left[communicates] = self.plan.calls

    def count(self) -> None:
        """One more call; begin again where that was asked for."""
        self._calls += 1
        if self.plan.every and self._calls % self.plan.every == 0:
            self._left = dict.fromkeys(self._left, self.plan.calls)

    def needs_flush(self, is_pending: bool) -> bool:
        """Whether a pending update must be made before an eager call can begin."""
        if not is_pending or not any(self._left.values()):
            return False
        return self._pending is None or self._pending.chained >= _LONGEST_CHAIN

    # ------------------------------------------------------------------------
    # Before the compiled call.

    @without_flushing()
    def run(
        self,
        program: Program,
        inventory: Inventory,
        mode: ParallelMode,
        *,
        is_pending: bool,
    ) -> _Call | None:
        """Make a call eagerly, on copies, where one is due."""
        communicates = bool(len(program.ledger))
        if not self._left.get(communicates):
            return None
        start = time.perf_counter()
        why = self._why_not(program, inventory, mode)
        differs = not has_same_kernels(inventory, mode, program.backend)
        has_room = differs and _has_room_for_two(program, inventory, mode)
        why, measures = self._agree_to_begin(program, mode, communicates, why, has_room)
        if why is not None:
            self._skip(why)
            self._left[communicates] = 0
            return None
        self._is_unmeasured |= differs and not measures
        before = self._pending if is_pending else None
        make_call = functools.partial(
            run_eagerly,
            self.function,
            program,
            inventory,
            mode,
            None if before is None else before.eager,
            communicates=communicates,
        )
        amplified = Amplified()
        with phase("shadow"), without_flushing_in_backward():
            eager = make_call(way=Way.FIRST if measures else Way.ALONE)
            if measures:
                other = make_call(way=Way.PERTURBED)
                amplified = Amplified.between(eager, other)
        eager.sums.clear()
        self._left[communicates] -= 1 if self._left[communicates] > 0 else 0
        is_first = program.number not in self._seen
        self._seen.add(program.number)
        return _Call(
            program,
            inventory,
            mode,
            eager,
            Generators(inventory),
            tolerance_of(program, inventory, mode),
            self._calls,
            0 if before is None else before.chained + 1,
            is_first,
            amplified,
            time.perf_counter() - start,
            _why_void(eager, mode),
        )

    def _why_not(
        self, program: Program, inventory: Inventory, mode: ParallelMode
    ) -> Skip | None:
        """Why this call cannot be made eagerly; None where it can be."""
        if mode.mesh is not None and dist.get_backend() == "fake":
            return Skip("the process group is fake, and gives no values")
        if any(slot.tensor.is_meta for slot in inventory.slots):
            return Skip("tensors are on the meta device")
        if program.backend == "inductor" and draws(program.graph):
            return Skip(
                "Inductor draws other random numbers than eager code; compare a step "
                "without them (dropout 0), or with backend='graph'"
            )
        needed, free = needed_bytes(program, inventory, mode), free_bytes(inventory)
        if free is not None and needed > free:
            return _shortage(
                f"copies and an eager call would take {needed / 2**30:.1f} GiB, "
                f"{free / 2**30:.1f} GiB are free"
            )
        return None

    def _skip(self, why: Skip) -> None:
        if why.text in self._notes:
            return
        self._notes[why.text] = None
        if why.warns:
            text = f"{self.name}: calls are not compared with eager ones: {why.text}."
            warnings.warn(text, ShadowWarning, stacklevel=5)

    # ------------------------------------------------------------------------
    # After it.

    @without_flushing()
    def compare(self, call: _Call | None, result: Any, *, is_pending: bool) -> None:
        """Compare what the compiled call left; raise on all ranks where any differs.

        Args:
            call: What ``run`` gave.
            result: What the compiled call returned.
            is_pending: Whether it left updates for the next call.
        """
        start = time.perf_counter()
        before, self._pending = self._pending, None
        outcome = Outcome(differences=[*self._found])
        self._found = []
        if before is not None and before.is_left:
            _compare_late(before, outcome)  # made by this call, or by a flush
        # All that differs now may follow from an earlier difference.
        is_earlier = bool(outcome.differences)
        if call is not None and not is_earlier:
            self._compare_now(call, result, outcome, is_pending=is_pending)
            if is_pending:
                call.is_left, self._pending = True, call
        self._seconds += time.perf_counter() - start + (call.seconds if call else 0.0)
        self._largest = max(self._largest, outcome.largest)
        self._noise += outcome.noise
        self._compared += outcome.compared
        self._made += call is not None
        latest = before if is_earlier or call is None else call
        if latest is not None:
            self._conclude(latest, outcome)

    def _compare_now(
        self, call: _Call, result: Any, outcome: Outcome, *, is_pending: bool
    ) -> None:
        eager = call.eager
        if call.void is not None:
            return
        if eager.error is not None:
            name = type(eager.error).__name__
            text = str(eager.error).strip().partition("\n")[0]
            raised = Difference("the eager step", f"raises {name}", f": {text}")
            outcome.differences.append(raised)
            return
        if eager.changes:
            changes = ", ".join(eager.changes[:_SHOWN])
            outcome.differences.append(Difference("Python", "", f": {changes}"))
        if self._draws_differ(call):
            text = " is in another state than after the eager step"
            outcome.differences.append(Difference("random generator", "", text))
        own, rounding = own_rows(call.mode), call.rounding
        if stored := call.program.stored_in(call.inventory):
            result = result, stored
        compare_returned(eager.results, result, rounding, outcome, own)
        values = [each for each in eager.values if not (is_pending and each.is_late)]
        compare_values(values, rounding, outcome)
        outcome.drop_following()

    def _draws_differ(self, call: _Call) -> bool:
        now = call.generators.states()
        return bool(call.eager.random) and not all(
            map(torch.equal, now, call.eager.random)
        )

    @without_flushing()
    def after_flush(self) -> None:
        """Compare what a flush has written: it is the whole update of the call before."""
        before, self._pending = self._pending, None
        if before is None or not before.is_left:
            return
        outcome = Outcome()
        _compare_late(before, outcome)
        self._found += outcome.differences
        self._compared += outcome.compared
        before.is_left = False
        before.eager.values.clear()
        self._pending = before  # ranks speak about it in the next call
        if self._found and not self._ranks(before):
            self.drop()

    def settle(self) -> None:
        """After the last call of all ranks: ranks say what its flush has shown."""
        if self._pending is not None:
            self.compare(None, None, is_pending=False)

    def drop(self) -> None:
        """Forget what is pending; raise where a flush has shown a difference."""
        pending, self._pending = self._pending, None
        found, self._found = self._found, []
        if found and pending is not None:
            raise ShadowError(self._describe(pending, found, {}))

    # ------------------------------------------------------------------------
    # Ranks.

    def _ranks(self, call: _Call) -> list[int]:
        program = call.program
        if not len(program.ledger) or dist.get_backend() == "fake":
            return []
        return _peers(program, call.mode)

    def _agree_to_begin(
        self,
        program: Program,
        mode: ParallelMode,
        communicates: bool,
        why: Skip | None,
        measures: bool,
    ) -> tuple[Skip | None, bool]:
        """Why some rank cannot make an eager call; None where all can make it.

        And whether all make a second one, with other last bits.
        """
        if mode.mesh is None or not communicates or dist.get_backend() == "fake":
            return why, measures
        state = ""
        if isinstance(mode, GlobalBatch) and draws(program.graph):
            state = str(torch.default_generator.get_state().sum().item())
        ranks = _peers(program, mode)
        try:
            texts = self._exchange(json.dumps([why, state, measures]), ranks, "begin")
        except _GivenUpError as error:
            return self._give_up(str(error)), False
        found = {rank: json.loads(text) for rank, text in texts.items()}
        for rank, (reason, *_) in sorted(found.items()):
            if reason is not None:
                text, warns = reason
                is_own = rank == dist.get_rank()
                return Skip(text if is_own else f"rank {rank}: {text}", warns), False
        if len({state for _, state, _ in found.values()}) > 1:
            seeds = Skip(
                "ranks have other seeds, and the default mode draws random numbers for "
                "all rows from each of them. Seed all ranks alike to compare"
            )
            return seeds, False
        return None, all(each for *_, each in found.values())

    def _conclude(self, call: _Call, outcome: Outcome) -> None:
        """Share what was found, and raise on every rank where any has a difference."""
        found, ranks = outcome.differences, self._ranks(call)
        told = _Told(call.void, str(found[0]) if found else "")
        all_told = {-1: told}
        if len(ranks) > 1:
            sums = _checksums(call)
            text = json.dumps(told._replace(sums=sums))
            try:
                texts = self._exchange(text, ranks, "end")
            except _GivenUpError as error:
                if found:
                    raise ShadowError(self._describe(call, found, {})) from None
                self._give_up(str(error))
                return
            all_told = {rank: _Told.read(text) for rank, text in texts.items()}
        void = [each.void for each in all_told.values() if each.void is not None]
        if void:  # what others found may follow from it
            self._skip(void[0])
            self._left = dict.fromkeys(self._left, 0)
            return
        others = {
            rank: each.first
            for rank, each in sorted(all_told.items())
            if each.first and len(ranks) > 1 and rank != dist.get_rank()
        }
        if not found and not others:
            found = _unlike_replicas(all_told, call.mode)
        if found or others:
            self._pending = None
            raise ShadowError(self._describe(call, found, others))

    def _exchange(self, text: str, ranks: list[int], stage: str) -> Mapping[int, str]:
        self._exchanged += 1
        key = self._place
        found = exchange_texts(
            text, ranks, f"{key}/{self._exchanged}/{stage}", _SECONDS, f"{key}/failed"
        )
        if found.failures:
            failed = "; ".join(f"rank {r}: {t}" for r, t in found.failures.items())
            raise _GivenUpError(f"a call failed on another rank ({failed})")
        # A rank that is here has read all that was posted for the last call but one.
        rank = dist.get_rank()
        for old in ("begin", "end"):
            _torch.default_store().delete_key(
                f"{key}/{self._exchanged - 4}/{old}/{rank}"
            )
        return found.require_all(
            f"{self.name}: a call that is also made eagerly",
            "Every rank must call the step equally often; shadow=0 compares nothing.",
        )

    @contextlib.contextmanager
    def reporting_failure(self, call: _Call | None) -> Iterator[None]:
        """Tell ranks that would wait for this one when the compiled call fails inside."""
        try:
            yield
        except BaseException as error:
            self._pending, self._found = None, []
            if call is not None and len(self._ranks(call)) > 1:
                self._give_up("a call failed on this rank")
                with contextlib.suppress(RuntimeError):
                    store, key = _torch.default_store(), f"{self._place}/failed"
                    post_failure(store, dist.get_rank(), key, error)
            raise

    def _give_up(self, text: str) -> Skip:
        """Compare nothing any more: ranks do not call the step alike."""
        why = Skip(text)
        self._skip(why)
        self._left, self._pending, self._found = {}, None, []
        self.plan = ShadowPlan(0)
        return why

    # ------------------------------------------------------------------------
    # Texts.

    def lines(self) -> list[str]:
        """What ``explain`` says about them."""
        if self.refusal:
            return [f"  shadow steps: none, {self.refusal}"]
        lines = []
        if self._made:
            largest = f"{self._largest:.1g} of a value's size at most"
            same = "equal bits" if not self._largest and not self._noise else largest
            calls = format_count(self._made, "call was", "calls were")
            lines.append(
                f"  shadow steps: {calls} also made eagerly, {self._compared} values "
                f"compared: {same}; they took {self._seconds:.2f} s"
            )
        if self._is_unmeasured:
            lines.append(
                "  shadow steps: memory is short for a second eager call, which shows how "
                "much rounding the step amplifies: such rounding is called a difference"
            )
        return lines + [f"  shadow steps: not compared: {why}" for why in self._notes]

    def _describe(
        self, call: _Call, found: list[Difference], others: Mapping[int, str]
    ) -> str:
        program = call.program.number
        lines = [
            f"{self.name}: the compiled step does not do what the step does eagerly "
            f"(call {call.number}, program {program})",
            "",
        ]
        lines += [f"  * {each}" for each in found[:_SHOWN]]
        if len(found) > _SHOWN:
            lines.append(f"    and {len(found) - _SHOWN} more values")
        lines += [f"  * rank {rank}: {text}" for rank, text in others.items()]
        equal = self._made - 1
        lines += [
            "",
            f"since call {call.number}; {max(equal, 0)} calls before it were equal",
        ]
        evidence = Evidence(
            call.eager,
            bool(call.eager.random) and self._draws_differ(call),
            self._changed_numbers(call),
            call.is_first,
        )
        cause, remedy = likely_cause(found, evidence)
        if found:
            lines += [f"likely cause: {cause}.", "", f"{remedy}."]
        lines.append(
            "Your model, optimizer and arguments are as the compiled step left them."
        )
        return "\n".join(lines)

    def _changed_numbers(self, call: _Call) -> list[str]:
        then = self._captured.get(call.program.number, {})
        return [
            f"{name} {then[name]:g} -> {now:g}"
            for name, now in _numbers(call.inventory).items()
            if name in then and then[name] != now
        ]


class _GivenUpError(Exception):
    """Another rank does not come any more."""


class _Told(NamedTuple):
    """What one rank says about a call.

    Attributes:
        void: Why it compared nothing.
        first: Its first difference; empty where there is none.
        sums: Of its parameters.
    """

    void: Skip | None
    first: str
    sums: Sequence[str] = ()

    @classmethod
    def read(cls, text: str) -> "_Told":
        """What a rank has sent."""
        void, first, sums = json.loads(text)
        return cls(None if void is None else Skip(*void), first, sums)


def _peers(program: Program, mode: ParallelMode) -> list[int]:
    """The ranks of the mode, and those of other groups that the program speaks to."""
    own = [] if mode.mesh is None else mode.mesh.mesh.flatten().tolist()
    return sorted({dist.get_rank(), *own, *peers_of(program.graph)})


def _unlike_replicas(told: Mapping[int, _Told], mode: ParallelMode) -> list[Difference]:
    """Parameters that ranks must hold alike, and do not."""
    mesh = mode.mesh
    if mesh is None or len(told) < 2:
        return []
    known: dict[str, tuple[int, str]] = {}
    for rank in mesh.mesh.flatten().tolist():
        for text in told[rank].sums:
            name = text.partition(" ")[0]
            first, one = known.setdefault(name, (rank, text))
            if one != text:
                amount = f" has other values on rank {first} than on rank {rank}"
                return [Difference(Kind.REPLICA, name, amount)]
    return []


def _checksums(call: _Call) -> Sequence[str]:
    """Checksums of what this rank holds of parameters, by which part of them it is."""
    mode = call.mode
    if not isinstance(mode, FullySharded):
        return checksum_parameters(call.inventory, mode)
    return checksums(
        [
            replace(slot, name=f"{slot.name}{mode.part_of(slot.tensor)}")
            for slot in call.inventory.slots
            if slot.role is Role.PARAMETER
        ]
    )


def _why_void(eager: Eager, mode: ParallelMode) -> Skip | None:
    """Why an eager call says nothing; None where it does."""
    error = eager.error
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return _shortage("an eager call ran out of memory")
    if error is not None and isinstance(mode, FullySharded):
        return Skip(
            f"the step raises {type(error).__name__} on whole parameters: its code is "
            "written for shards",
            warns=True,
        )
    return None


def _has_room_for_two(
    program: Program, inventory: Inventory, mode: ParallelMode
) -> bool:
    """Whether a second eager call, which shows amplified rounding, fits into memory."""
    free = free_bytes(inventory)
    return free is None or needed_bytes(program, inventory, mode, calls=2) <= free


def _shortage(text: str) -> Skip:
    """Memory is short: how to compare nevertheless."""
    return Skip(
        f"{text}. To compare, run a few steps with fewer layers or a smaller batch, on a "
        "CPU, or pass shadow=0 to leave it",
        warns=True,
    )


def _compare_late(call: _Call, outcome: Outcome) -> None:
    """Compare the update that a call left, once it was made."""
    values = [each for each in call.eager.values if each.is_late]
    compare_values(values, call.rounding, outcome)
    outcome.drop_following()


def _numbers(inventory: Inventory) -> dict[str, float]:
    return {
        number.name: number.value
        for number in inventory.numbers
        if not (number.is_state or number.is_counter) and number.leaf < 0
    }
