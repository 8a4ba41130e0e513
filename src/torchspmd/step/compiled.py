"""A compiled training step: its programs, why each exists, and how long each takes."""

import functools
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, NoReturn, Self, final

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.comm import Ledger
from torchspmd.errors import CaptureError, UsageError
from torchspmd.layout.names import format_mesh
from torchspmd.step.capture.guard_cache import GuardCache
from torchspmd.step.capture.guards import explain_difference, sign
from torchspmd.step.capture.inventory import Inventory, take_inventory
from torchspmd.step.capture.override import Override, Overrides
from torchspmd.step.capture.spread import Spread
from torchspmd.step.deferred import (
    Pending,
    expected,
    flush_last,
    flush_others,
    flush_shared,
)
from torchspmd.step.flush_hooks import without_flushing
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.memory import PeakMemory
from torchspmd.step.lower.in_place import InPlaceReport
from torchspmd.step.measure.exposure import check_request, measure_program
from torchspmd.step.measure.exposure_report import ExposureReport
from torchspmd.step.modes.data_parallel import DataParallel, resolve_spread
from torchspmd.step.pipeline import StepOptions, build_program
from torchspmd.step.program import Program
from torchspmd.step.progress import logger, phase
from torchspmd.step.rank_agreement import Agreement, Switches
from torchspmd.step.shadow.check import Plan, Shadow
from torchspmd.step.virtual.certificate import Certificate
from torchspmd.step.virtual.verify import Verification

# ----------------------------------------------------------------------------
# What stays of the programs of a step that was closed: what they said, not the graphs.


@dataclass(frozen=True, slots=True, repr=False)
class ClosedProgram:
    """What is known about a program whose step was closed; it holds no graph or tensor.

    Attributes:
        number: Its place among the programs of its compiled step.
        num_nodes: How many nodes its graph had.
        reason: Why it was captured.
        ledger: What the graph communicated.
        certificate: Which passes ran, what they claim, what was checked and what not.
        in_place: Which new values were computed in the memory of the old ones.
        peak_memory: What was alive at the worst moment.
        notes: What else was done to the graph, a line each.
        capture_seconds: Time to trace, transform and compile it.
        first_run_seconds: Time of its first run, after capture.
        step_seconds: Times of the latest runs after the first.
        explanation: The lines of ``explain()`` about it.
    """

    number: int
    num_nodes: int
    reason: str
    ledger: Ledger
    certificate: Certificate
    in_place: InPlaceReport
    peak_memory: PeakMemory | None
    notes: tuple[str, ...]
    capture_seconds: float
    first_run_seconds: float | None
    step_seconds: tuple[float, ...]
    explanation: tuple[str, ...]

    @classmethod
    def of(cls, program: Program) -> "ClosedProgram":
        """What to keep of a program."""
        new: dict[str, Any] = {
            "num_nodes": len(program.graph.graph.nodes),
            "step_seconds": tuple(program.step_seconds),
        }
        names = [each.name for each in fields(cls) if each.name not in new]
        return cls(**new, **{name: getattr(program, name) for name in names})

    def __repr__(self) -> str:
        """One line, as of a program."""
        return f"ClosedProgram({self.number}: {self.num_nodes} nodes, {self.ledger!r})"

    @property
    def graph(self) -> NoReturn:
        """Gone with its step."""
        raise self._gone("graph")

    @property
    def code(self) -> NoReturn:
        """Gone with its step."""
        raise self._gone("code")

    def _gone(self, name: str) -> UsageError:
        return UsageError(
            f"program {self.number}: its step was closed, by close() or the end of `with`, "
            f"and no graph is kept then. Look at programs[{self.number}].{name} before "
            "that; what stays is certificate, ledger, peak_memory, in_place, reason, notes "
            "and times."
        )


MAX_PROGRAMS = 8

_made: dict[str, int] = {}  # how many steps of each name this process has compiled


def name_of_step(function: Callable[..., Any]) -> str:
    """What a step is called in messages and between ranks: the same on every rank.

    >>> name_of_step(functools.partial(max, 0))
    'max'
    """
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


@final
class CompiledStep:
    """What ``compile`` returns: call it like the step that it was made from.

    Attributes:
        programs: The captured programs, oldest first; without graphs once closed.
    """

    def __init__(  # noqa: PLR0913 - one for each choice
        self,
        function: Callable[..., Any],
        *,
        gm_transformation: Callable[[fx.GraphModule], Any] | None,
        parallel_mode: DataParallel | None,
        mesh: DeviceMesh | None,
        backend: str,
        module_override: Sequence[Override] = (),
        verify: Verification | None = None,
        shadow: Plan,
    ) -> None:
        functools.update_wrapper(self, function)
        self._name = name_of_step(function)
        self._options = StepOptions(
            function,
            self._name,
            gm_transformation,
            backend,
            Overrides(module_override),
            verify,
        )
        self._parallel_mode, self._asked_mesh = parallel_mode, mesh
        self._spread: Spread | None = None
        self._programs: list[Program] = []
        self._by_signature: dict[Any, list[Program]] = {}
        self._known = GuardCache[Program]()
        self._closed, self._closed_by = tuple[ClosedProgram, ...](), ""
        self._pending: Pending | None = None
        # A thread that saves a checkpoint while another one trains waits for the step.
        self._lock = threading.RLock()
        self._num_measured = self._num_tries = 0
        # The same on every rank when ranks compile the same steps in the same order.
        self._serial = _made[self._name] = _made.get(self._name, -1) + 1
        self._switches = Switches(self._name, str(self._serial))
        refusal = "modules have stand-ins (module_override)" if module_override else ""
        self._shadow = Shadow(
            self._name, str(self._serial), function, shadow, backend, refusal
        )

    @property
    def parallel_mode(self) -> DataParallel | None:
        """How the program itself spreads the step over ranks; None: as it is written."""
        return self._parallel_mode

    def __call__(self, *args: Any, last_train_step: bool = False, **kwargs: Any) -> Any:
        """Run one step; build a program for it first where none fits."""
        with self._lock, _torch.profiled("torchspmd::step"):
            self._check_open()
            self._shadow.count()
            if self._shadow.needs_flush(self._pending is not None):
                self.flush()
            with self._options.overrides.standing_in(args, kwargs) as (own, named):
                program, inventory = self._find(own, named)
                if program is None:
                    program = self._build(inventory)
                    self._switches.to_new(program)
                else:
                    self._switches.to_known(program)
            return self._run(program, inventory, last_train_step)

    def _find(self, args: Any, kwargs: Any) -> tuple[Program | None, Inventory]:
        """What a call works on and its program, once updates that come first are made."""
        program, inventory = self._look_up(args, kwargs)
        if flush_others(inventory, self._pending):
            program, inventory = self._look_up(args, kwargs)
        if self._pending is None:
            return program, inventory
        if program and self._pending.belongs_to(program, inventory):
            program.num_early -= program.num_early > 0
            return program, inventory
        # Another program, or other tensors: what is pending comes first.
        self._pending.note_other_tensors(program, inventory)
        self.flush()
        return self._look_up(args, kwargs)

    def _run(self, program: Program, inventory: Inventory, last: bool) -> Any:
        logger.debug("%s: step with program %d", self._name, program.number)
        # After one that leaves work it is a step like others, and a flush: all in place.
        is_alone = last and self._pending is None
        shadow, is_steady = self._shadow, self._shadow.is_idle
        eager = None
        if not is_steady:
            is_pending, spread = (
                self._pending is not None,
                self._resolve_spread(inventory),
            )
            eager = shadow.run(program, inventory, spread, is_pending=is_pending)
        self._pending = expected(
            self._pending, self._name, program, inventory, self.flush, last=is_alone
        )
        try:
            with shadow.reporting_failure(eager):
                result = program.call(inventory, last=is_alone)
        finally:
            if self._pending is not None:
                self._pending = self._pending.settle()
        if not is_steady:
            shadow.compare(eager, result, is_pending=self._pending is not None)
        if last:
            flush_last(self._name, self.flush)
            shadow.settle()
        return result

    @property
    def programs(self) -> tuple[Program | ClosedProgram, ...]:
        """The captured programs, oldest first; once closed, only what is light of them."""
        return self._closed if self._closed_by else tuple(self._programs)

    def explain(self) -> str:
        """Which programs there are, why each was captured, and what it costs."""
        closed = f", closed by {self._closed_by}" if self._closed_by else ""
        lines = [f"{self._name}: {len(self.programs)} programs{closed}"]
        lines += [line for each in self.programs for line in each.explanation]
        return "\n".join([*lines, *self._shadow.lines()])

    def exposure(
        self, *args: Any, runs: int = 5, cost: CostModel | None = None, **kwargs: Any
    ) -> ExposureReport:
        """Measure how long computation waits for each collective, and why.

        Call it on every rank with the arguments of a step that was made. The step's graph
        is run on copies: no step is made, and what is pending stays pending.

        Args:
            args: The arguments of the step.
            runs: How many runs to take medians of.
            cost: For what is simulated beside it; by default that of the transformation.
            kwargs: The step's arguments by name.
        """
        self._check_open()
        self._num_measured += 1  # before anything can fail: ranks must count alike
        check_request("exposure", runs, cost)
        with self._options.overrides.standing_in(args, kwargs) as (positional, named):
            program, inventory = self._look_up(positional, named)
        key = f"torchspmd/exposure/{self._name}/{self._serial}/{self._num_measured}"
        return measure_program(
            self._name,
            program,
            inventory,
            key,
            runs=runs,
            cost=cost or _cost_of(self._options.transformation),
            is_compiled=self._options.backend != "graph",
        )

    def flush(self) -> None:
        """Make the updates that a pass moved to the next call.

        Parameters, optimizer states and gradients are then those of the eager step. Happens
        by itself before a ``state_dict``, ``eval``, eager call or other look at the module
        or optimizer, when another program is needed, and in ``close``.
        """
        with self._lock:
            if self._pending is not None:
                with phase("flush", self._name):
                    self._pending.flush()
                self._pending = None
                self._shadow.after_flush()

    def close(self) -> None:
        """Flush, and let go of every graph; the step cannot be called any more."""
        self._close("close()")

    def _close(self, by: str) -> None:
        self.flush()
        if not self._closed_by:
            self._closed = tuple(map(ClosedProgram.of, self._programs))
            self._closed_by = by
        self._programs.clear()
        self._by_signature.clear()
        self._known = GuardCache[Program]()
        self._shadow.drop()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._close("the end of `with`")
        except Exception as failure:
            if error is None:
                raise
            error.add_note(
                f"{self._name}: the pending update could not be made: {failure}"
            )

    @without_flushing()
    def _look_up(self, args: Any, kwargs: Any) -> tuple[Program | None, Inventory]:
        """What a call works on, and the program that serves it if there is one."""
        known = self._known.find(args, kwargs)
        if known is not None:
            return known
        with _torch.profiled("torchspmd::inventory"):
            # Compiled code takes tensors only: hyper-parameters become constants.
            lift_numbers = self._options.backend == "graph"
            function = self._options.function
            inventory = take_inventory(
                args, kwargs, lift_numbers=lift_numbers, function=function
            )
        programs = self._by_signature.get(sign(inventory), ())
        program = next((each for each in programs if each.accepts(inventory)), None)
        if program is not None:
            self._known.add(inventory, program)
        return program, inventory

    def _check_open(self) -> None:
        """Raise where the step was closed, or has no ranks to talk to any more."""
        if self._closed_by:
            raise UsageError(
                f"{self._name}: this compiled step was closed by {self._closed_by}, and "
                "cannot be called any more. Compile its function again (of a decorated "
                "one, it is __wrapped__). Between epochs call flush() instead, with one "
                "`with` around all of them."
            )
        mesh = None if self._spread is None else self._spread.mesh
        if mesh is not None and not dist.is_initialized():
            raise UsageError(
                f"{self._name}: this step was captured for the mesh {format_mesh(mesh)}, "
                "whose process groups were destroyed since, so that it cannot be called "
                "any more. Call it before destroy_process_group(), or compile its "
                "function again behind init_process_group()."
            )

    def _build(self, inventory: Inventory) -> Program:
        number = len(self._programs)
        reason = _why(inventory, self._programs, self._by_signature)
        _check_capture(self._name, number, reason)
        flush_shared(inventory)
        spread = self._resolve_spread(inventory)
        self._num_tries += 1  # ranks that fail do so together, and may try again
        key = f"{self._serial}/{self._num_tries}"
        ranks = Agreement(self._name, key, number, spread.mesh)
        program = build_program(self._options, inventory, spread, ranks, number, reason)
        self._programs.append(program)
        self._by_signature.setdefault(program.signature, []).append(program)
        self._shadow.note_build(program, inventory)
        return program

    def _resolve_spread(self, inventory: Inventory) -> Spread:
        if self._spread is None:
            devices = [slot.tensor.device for slot in inventory.slots]
            device = devices[0] if devices else torch.device("cpu")
            self._spread = resolve_spread(self._parallel_mode, self._asked_mesh, device)
        return self._spread


def _check_capture(name: str, number: int, reason: str) -> None:
    """Refuse a program without gradients, and one more where there are many already."""
    if not torch.is_grad_enabled():
        raise CaptureError(
            f"compile on {name!r}: gradients are disabled here. Call the step outside "
            "torch.no_grad()."
        )
    if number >= MAX_PROGRAMS:
        raise CaptureError(
            f"compile on {name!r}: {MAX_PROGRAMS} programs are captured already and this "
            f"call fits none of them.\n\n{textwrap.indent(reason, '  ')}\n\nKeep what "
            "changes constant (pad batches to one shape), pass it as a tensor (also a "
            "number that the step reads from an object or a variable and that is another "
            "one in each call: torch.tensor(x), or a float argument), count what the step "
            "does not need where it is called, make the optimizer with foreach=True where "
            "a schedule changes more than its lr, or call close() and compile again."
        )


def _cost_of(transformation: object) -> CostModel | None:
    """What a transformation chose by; one of the user's own may call anything cost."""
    found = getattr(transformation, "cost", None)
    return found if isinstance(found, CostModel) else None


def _why(
    inventory: Inventory,
    programs: Sequence[Program],
    by_signature: Mapping[Any, Sequence[Program]],
) -> str:
    """What kept each earlier program from serving a call."""
    if not programs:
        return "first call"
    signature = sign(inventory)
    for program in by_signature.get(signature, ()):
        broken = program.broken_assumptions(inventory)
        if broken:
            lines = [f"not {line}" for line in broken]
            return f"differs from program {program.number}:\n" + "\n".join(lines)
    latest = programs[-1]
    lines = explain_difference(latest.signature, signature)
    return f"differs from program {latest.number}:\n" + "\n".join(lines)
