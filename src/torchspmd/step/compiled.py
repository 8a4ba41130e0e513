"""A compiled training step: its programs, why each exists, and how long each takes."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import nn

from torchspmd import _torch
from torchspmd.comm import format_count
from torchspmd.errors import CaptureError, UsageError
from torchspmd.layout.names import format_mesh
from torchspmd.step.build import FixedSizesError, StepOptions, build_program
from torchspmd.step.capture.initial_states import InitialStates, UnusedStatesError
from torchspmd.step.capture.inventory import (
    Counter,
    CountersError,
    Inventory,
    TakeMoreError,
    Taken,
    take_inventory,
)
from torchspmd.step.capture.parallel_mode import ParallelMode
from torchspmd.step.capture.user_code import calling_line
from torchspmd.step.flush_hooks import without_flushing
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.measure.exposure import check_request, measure_program
from torchspmd.step.measure.exposure_report import ExposureReport
from torchspmd.step.modes.data_parallel import DataParallel, resolve_mode
from torchspmd.step.modes.full_parameters import full_parameters
from torchspmd.step.modes.fully_shard import FullySharded
from torchspmd.step.modes.shard_layout import DataAxes
from torchspmd.step.pending import (
    Pending,
    expected,
    flush_last,
    flush_others,
    flush_shared,
)
from torchspmd.step.program import ClosedProgram, Program
from torchspmd.step.programs import Programs, Request, warn_of_many
from torchspmd.step.progress import logger, phase
from torchspmd.step.rank_agreement import Agreement, Calls, Switches, key_of_program
from torchspmd.step.runtime import current_runtime
from torchspmd.step.shadow.check import Shadow
from torchspmd.step.trial import Trials

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

    def __init__(self, options: StepOptions) -> None:
        functools.update_wrapper(self, options.function)
        self._options, self._name = options, options.name
        self._mode: ParallelMode | None = None
        self._programs = Programs()
        self._trials = Trials(self._name, self._programs)
        self._closed, self._closed_by = tuple[ClosedProgram, ...](), ""
        self._pending: Pending | None = None
        # A thread that saves a checkpoint while another one trains waits for the step.
        self._lock = threading.RLock()
        self._counters: set[Counter] = set()  # that were seen to count
        self._taken: set[Taken] = set()  # what its inventories have that most have not
        self._num_measured = self._num_tries = self._num_calls = 0
        # The same on every rank when ranks compile the same steps in the same order.
        self._serial = _made[self._name] = _made.get(self._name, -1) + 1
        self._switches = Switches(self._name, str(self._serial))
        self._calls = Calls(self._name)
        self._shadow = Shadow(
            self._name,
            str(self._serial),
            options.function,
            options.shadow,
            "modules have stand-ins (module_override)" if options.overrides else "",
        )

    @property
    def parallel_mode(self) -> DataParallel | None:
        """How the program itself spreads the step over ranks; None: as it is written."""
        return self._options.mode

    def __call__(self, *args: Any, last_train_step: bool = False, **kwargs: Any) -> Any:
        """Run one step; build a program for it first where none fits."""
        runtime = current_runtime()
        with self._lock, runtime.calling(), _torch.profiled("torchspmd::step"):
            self._check_open()
            self._check_alone()
            self._shadow.count()
            if self._shadow.needs_flush(self._pending is not None):
                self.flush()
            with self._options.overrides.standing_in(args, kwargs) as (own, named):
                program, inventory = self._find(own, named)
                if program is None:
                    program, inventory = self._build(own, named, inventory)
                    program = self._trials.serving(program)
                else:
                    self._switches.to_known(program.agreed, program.plan)
                if self._trials.is_debut(program):
                    self._shadow.begin_again(program)
                self._num_calls += 1
                program.last_call = self._num_calls
            with runtime.running(program, inventory), self._explaining(program):
                return self._run(program, inventory, last_train_step)

    @property
    def _key(self) -> str:
        """Which step of its name it is, and how often it has tried to build a program."""
        return f"{self._serial}/{self._num_tries + self._calls.num_told}"

    def _explaining(self, program: Program) -> contextlib.AbstractContextManager[None]:
        """Say what is wrong where ranks wait in vain for one that captures alone."""
        ranks = program.peers
        if not ranks:
            return contextlib.nullcontext()
        agreed = self._programs.num_agreed
        key = key_of_program(self._name, self._key, agreed)
        self._calls.begin(self._num_calls, ranks, key, agreed)
        return self._calls.explaining()

    def _find(self, args: Any, kwargs: Any) -> tuple[Program | None, Inventory]:
        """What a call works on and its program, once updates that come first are made."""
        program, inventory = self._look_up_serving(args, kwargs)
        if flush_others(inventory, self._pending):
            program, inventory = self._look_up_serving(args, kwargs)
        if self._pending is None:
            return program, inventory
        if program and self._pending.belongs_to(program, inventory):
            program.num_early -= program.num_early > 0
            return program, inventory
        # Another program or backend, or other tensors: what is pending comes first.
        self._pending.note_other_tensors(program, inventory)
        self.flush()
        return self._look_up_serving(args, kwargs)

    def _look_up_serving(
        self, args: Any, kwargs: Any
    ) -> tuple[Program | None, Inventory]:
        """What a call works on, and what makes it: the backend whose turn it is."""
        program, inventory = self._look_up(args, kwargs)
        return (program and self._trials.serving(program)), inventory

    def _run(self, program: Program, inventory: Inventory, last: bool) -> Any:
        logger.debug("%s: step with program %d", self._name, program.number)
        # After one that leaves work it is a step like others, and a flush: all in place.
        is_alone = last and self._pending is None
        shadow, is_steady = self._shadow, self._shadow.is_idle
        eager = None
        if not is_steady:
            mode, is_pending = self._resolve_mode(inventory), self._pending is not None
            eager = shadow.run(program, inventory, mode, is_pending=is_pending)
        self._pending = expected(
            self._pending, self._name, program, inventory, self.flush, last=is_alone
        )
        try:
            with shadow.reporting_failure(eager), self._trials.timing(program):
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
        return self._closed if self._closed_by else tuple(self._programs.kept)

    def explain(self) -> str:
        """Which programs there are, why each was captured, and what it costs."""
        closed = f", closed by {self._closed_by}" if self._closed_by else ""
        lines = [f"{self._name}: {format_count(len(self.programs), 'program')}{closed}"]
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
            is_compiled=program is not None and program.backend != "graph",
        )

    @contextlib.contextmanager
    def full_parameters(self, *models: nn.Module) -> Iterator[None]:
        """Give models whole parameters inside a ``with`` block, gathered from shards.

        For what needs a plain model after ``DataParallel("fully_shard")``: evaluation,
        ``generate()``, ``save_pretrained()``, ``AveragedModel``. Every rank enters the
        block at the same point; each then has the memory of all whole parameters. They
        are copies without gradients: writing to one is an error at the end. Without
        shards nothing is done.

        Args:
            models: The models of the step, or parts of them.
        """
        self.flush()
        if not models or not all(isinstance(each, nn.Module) for each in models):
            raise UsageError(
                f"{self._name}.full_parameters: pass the models, for instance "
                "full_parameters(model)."
            )
        mode = self._mode
        with self._lock:
            if mode is None or mode.mesh is None:
                yield
            else:
                axes = DataAxes.of(mode.mesh)
                if isinstance(mode, FullySharded):
                    axes = mode.axes
                with full_parameters(models, axes):
                    yield

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
            self._closed = tuple(map(ClosedProgram.of, self._programs.kept))
            self._closed_by = by
        self._programs = Programs()
        self._trials = Trials(self._name, self._programs)
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
        known = self._programs.recall(args, kwargs)
        if known is not None:
            return known
        inventory = self._take_inventory(args, kwargs)
        program = self._programs.find(inventory)
        if program is not None:
            self._programs.remember(inventory, program)
        return program, inventory

    def _take_inventory(self, args: Any, kwargs: Any) -> Inventory:
        with _torch.profiled("torchspmd::inventory"):
            # Compiled code takes tensors only: hyper-parameters become constants.
            lift_numbers = self._options.backend in ("graph", "auto")
            function = self._options.function
            return take_inventory(
                args,
                kwargs,
                lift_numbers=lift_numbers,
                function=function,
                counters=self._counters,
                taken=self._taken,
            )

    def _check_alone(self) -> None:
        """Raise where another step is being captured, which calls this one."""
        if _torch.current_graph() is not None:
            raise CaptureError(
                f"compile: a step that is captured calls {self._name}, which is a compiled "
                f"step itself\n\n  * {calling_line()}\n\nThe graph of one step cannot "
                "hold another one. Call the function that it was made from "
                f"({self._name}.__wrapped__), or call the two steps one after the other."
            )

    def _check_open(self) -> None:
        """Raise where the step was closed, or has no ranks to talk to any more."""
        if self._closed_by:
            raise UsageError(
                f"{self._name}: this compiled step was closed by {self._closed_by}, and "
                "cannot be called any more. Compile its function again (of a decorated "
                "one, it is __wrapped__). Between epochs call flush() instead, with one "
                "`with` around all of them."
            )
        mesh = None if self._mode is None else self._mode.mesh
        if mesh is not None and not dist.is_initialized():
            raise UsageError(
                f"{self._name}: this step was captured for the mesh {format_mesh(mesh)}, "
                "whose process groups were destroyed since, so that it cannot be called "
                "any more. Call it before destroy_process_group(), or compile its "
                "function again behind init_process_group()."
            )

    def _build(
        self, args: Any, kwargs: Any, inventory: Inventory
    ) -> tuple[Program, Inventory]:
        """A program for a call, and what it works on: its optimizers have their state."""
        options, programs = self._options, self._programs
        reason = programs.why_none_fits(inventory)
        flush_shared(inventory)
        mode = self._resolve_mode(inventory)
        ranks = Agreement(
            self._name,
            self._key,
            programs.num_agreed,
            mode.mesh,
            call=self._num_calls + 1,
            reason=reason if programs.kept else "",
        )
        with InitialStates(inventory, mode) as initial:
            if initial:
                inventory = initial.mark(self._take_inventory(args, kwargs))
                known = programs.find(inventory)
                if known is not None and known.updated >= inventory.initial:
                    self._switches.to_known(known.agreed, known.plan)
                    return known, inventory
            _check_gradients(self._name)
            warn_of_many(self._name, programs.num_built, reason)
            try:
                request = programs.request(
                    inventory,
                    mode,
                    ranks,
                    reason,
                    backend=options.backend,
                    measures_cost=options.measures_cost,
                )
                is_alone = request.like is not None
                with (
                    contextlib.nullcontext() if is_alone else ranks.reporting_failure()
                ):
                    captured = self._capture(
                        args, kwargs, inventory, initial, mode, ranks, request
                    )
            finally:
                # Ranks that fail do so together, and may try again.
                self._num_tries += ranks.is_used
        if captured is None:  # it needs more than the inventory has
            return self._build(args, kwargs, self._take_inventory(args, kwargs))
        program, inventory = captured
        is_agreed = program.agreed == request.agreed
        if is_agreed:
            self._switches.to_new(program.agreed, program.plan)
        else:
            self._switches.to_known(program.agreed, program.plan)
        programs.add(program, request, mode)
        on_stream = any(slot.tensor.is_cuda for slot in inventory.slots)
        self._trials.add(program, ranks, on_stream)
        self._shadow.note_build(program, inventory, is_agreed=is_agreed)
        return program, inventory

    def _capture(
        self,
        args: Any,
        kwargs: Any,
        inventory: Inventory,
        initial: InitialStates,
        mode: ParallelMode,
        ranks: Agreement,
        request: Request,
    ) -> tuple[Program, Inventory] | None:
        """Build the program; once more where less can be done than was asked for.

        None where its inventory must have more, such as an optimizer without its state.
        """
        while True:
            try:
                program = build_program(self._options, inventory, mode, ranks, request)
                return program, inventory
            except UnusedStatesError as unused:
                initial.keep_updated(inventory, unused)
            except CountersError as counted:
                self._counters.update(counted.counters)
            except TakeMoreError as more:
                self._taken.add(more.taken)
                initial.take_back()
                return None
            except FixedSizesError as fixed:
                logger.info("%s: sizes stay fixed", self._name, exc_info=True)
                why = str(fixed.__cause__).strip().partition("\n")[0]
                note = "one program for each size, since sizes cannot be symbols here: "
                request = replace(request, sizes=None, notes=(note + why,))
                continue
            inventory = self._take_inventory(args, kwargs)
            if initial:
                inventory = initial.mark(inventory)

    def _resolve_mode(self, inventory: Inventory) -> ParallelMode:
        if self._mode is None:
            devices = [slot.tensor.device for slot in inventory.slots]
            device = devices[0] if devices else torch.device("cpu")
            self._mode = resolve_mode(self._options.mode, self._options.mesh, device)
        return self._mode


def _check_gradients(name: str) -> None:
    if not torch.is_grad_enabled():
        raise CaptureError(
            f"compile on {name!r}: gradients are disabled here. Call the step outside "
            "torch.no_grad(); for an evaluation, put torch.no_grad() inside of the "
            "function."
        )


def _cost_of(transformation: object) -> CostModel | None:
    """What a transformation chose by; one of the user's own may call anything cost."""
    found = getattr(transformation, "cost", None)
    return found if isinstance(found, CostModel) else None
