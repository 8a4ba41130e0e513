"""A compiled training step: its programs, why each exists, and how long each takes."""

import contextlib
import functools
import textwrap
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from types import TracebackType
from typing import Any, NoReturn, Self, final

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.comm import Ledger
from torchspmd.errors import CaptureError, CaptureWarning, UsageError
from torchspmd.layout.names import format_mesh
from torchspmd.step.capture.dynamic import (
    differing_sizes,
    input_shapes,
    sizes_of,
    with_any_size,
)
from torchspmd.step.capture.guard_cache import GuardCache
from torchspmd.step.capture.guards import Signature, explain_difference, sign
from torchspmd.step.capture.initial_states import InitialStates, UnusedStatesError
from torchspmd.step.capture.inventory import Inventory, take_inventory
from torchspmd.step.capture.override import Override, Overrides
from torchspmd.step.capture.rank_divergence import find_other_axes
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
from torchspmd.step.modes.full_parameters import full_parameters
from torchspmd.step.modes.fully_shard import FullySharded
from torchspmd.step.modes.shard_layout import DataAxes
from torchspmd.step.pipeline import Request, StepOptions, build_program
from torchspmd.step.program import Program
from torchspmd.step.progress import logger, phase
from torchspmd.step.rank_agreement import Agreement, Switches, share_shapes
from torchspmd.step.shadow.check import Plan, Shadow
from torchspmd.step.transformation import GraphModuleTransformation
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


MANY_PROGRAMS = 8  # from here on more are told of, whenever they have doubled
MAX_PROGRAMS = 64  # that are kept: the one that was not used for the longest time goes

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
        self._num_built = self._num_agreed = self._num_calls = 0
        self._any_sizes: dict[str, frozenset[int]] = {}  # that took a second value
        self._has_fixed_sizes = False  # whether symbols for them were of no use
        self._masks: list[dict[str, frozenset[int]]] = []  # of programs for any size
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
                    program, inventory = self._build(own, named, inventory)
                else:
                    self._switches.to_known(program)
                self._num_calls += 1
                program.last_call = self._num_calls
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
        spread = self._spread
        with self._lock:
            if spread is None or spread.mesh is None:
                yield
            else:
                axes = DataAxes.of(spread.mesh)
                if isinstance(spread, FullySharded):
                    axes = spread.axes
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
        inventory = self._take_inventory(args, kwargs)
        program = self._find_program(inventory)
        if program is not None:
            self._known.add(inventory, program)
        return program, inventory

    def _find_program(self, inventory: Inventory) -> Program | None:
        signature = sign(inventory)
        found = [self._by_signature.get(signature, ())]
        for dims in self._masks:
            found.append(self._by_signature.get(with_any_size(signature, dims), ()))
        fitting = chain.from_iterable(found)
        return next((each for each in fitting if each.accepts(inventory)), None)

    def _take_inventory(self, args: Any, kwargs: Any) -> Inventory:
        with _torch.profiled("torchspmd::inventory"):
            # Compiled code takes tensors only: hyper-parameters become constants.
            lift_numbers = self._options.backend == "graph"
            function = self._options.function
            return take_inventory(
                args, kwargs, lift_numbers=lift_numbers, function=function
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
        mesh = None if self._spread is None else self._spread.mesh
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
        reason = _why(inventory, self._programs, self._by_signature)
        flush_shared(inventory)
        spread = self._resolve_spread(inventory)
        key = f"{self._serial}/{self._num_tries}"
        ranks = Agreement(self._name, key, self._num_agreed, spread.mesh)
        with InitialStates(inventory, spread) as initial:
            if initial:
                inventory = initial.mark(self._take_inventory(args, kwargs))
                known = self._find_program(inventory)
                if known is not None and known.updated >= inventory.initial:
                    self._switches.to_known(known)
                    return known, inventory
            _check_capture(self._name, self._num_built, reason)
            try:
                request = self._request(inventory, spread, ranks, reason)
                is_joint = request.like is None
                with (
                    ranks.reporting_failure() if is_joint else contextlib.nullcontext()
                ):
                    program, inventory = self._capture(
                        args, kwargs, inventory, initial, spread, ranks, request
                    )
            finally:
                # Ranks that fail do so together, and may try again.
                self._num_tries += ranks.is_used
        self._num_built += 1
        if request.sizes is not None and program.sizes is None:
            # A size of 0 or 1 is always one of its own.
            self._has_fixed_sizes |= (
                min(chain(*input_shapes(sign(inventory)).values())) > 1
            )
        is_agreed = program.agreed == self._num_agreed
        if is_agreed:
            self._num_agreed += 1
            self._switches.to_new(program)
        else:
            self._switches.to_known(program)
        self._keep(program)
        self._shadow.note_build(program, inventory, is_agreed=is_agreed)
        return program, inventory

    def _capture(
        self,
        args: Any,
        kwargs: Any,
        inventory: Inventory,
        initial: InitialStates,
        spread: Spread,
        ranks: Agreement,
        request: Request,
    ) -> tuple[Program, Inventory]:
        """Build the program; once more where state was made that the step does not use."""
        while True:
            try:
                return build_program(
                    self._options, inventory, spread, ranks, request
                ), inventory
            except UnusedStatesError as unused:
                initial.keep_updated(inventory, unused)
                inventory = self._take_inventory(args, kwargs)
                if initial:
                    inventory = initial.mark(inventory)

    def _request(
        self, inventory: Inventory, spread: Spread, ranks: Agreement, reason: str
    ) -> Request:
        """Which program to build: for which sizes, and whether other ranks are asked."""
        signature = sign(inventory)
        is_alone = spread.mesh is None
        others = find_other_axes(inventory.slots, spread.sharded_over)
        has_own = spread.has_own_batches and not others
        like = self._find_like(signature)
        transformation = self._options.transformation
        measures = isinstance(transformation, GraphModuleTransformation) and (
            transformation.measures_cost
        )
        is_local = has_own and like is not None and not measures
        shapes = input_shapes(signature) if like is None else like.shapes
        if has_own and not is_local:
            shapes, dims = share_shapes(ranks, shapes, self._any_sizes)
            self._any_sizes = dims
        fixed = self._fixed_sizes(is_alone, has_own)
        sizes = None
        if self._any_sizes and not fixed:
            sizes = sizes_of(signature, self._any_sizes, shapes)
        return Request(
            number=self._num_built,
            reason="\n".join(filter(None, (reason, fixed))),
            sizes=sizes,
            like=like if is_local else None,
            has_own_batches=has_own,
            agreed=self._num_agreed,
        )

    def _fixed_sizes(self, is_alone: bool, has_own_batches: bool) -> str:
        """Why sizes that change cannot be symbols; empty where they can, or none does."""
        if not self._any_sizes:
            return ""
        why = ""
        if self._options.backend != "graph":
            why = f"backend={self._options.backend!r} compiles for each"
        elif not is_alone and not has_own_batches:
            why = "what ranks send may depend on them"
        elif self._has_fixed_sizes:
            why = "they could not be symbols of a graph, see an earlier program"
        return f"one program for each size: {why}" if why else ""

    def _find_like(self, signature: Signature) -> Program | None:
        """The latest program that differs from a call in sizes of its batch alone."""
        for program in reversed(self._programs):
            found = differing_sizes(program.signature, signature)
            if found:
                for name, dims in found.items():
                    known = self._any_sizes.get(name, frozenset())
                    self._any_sizes[name] = known | dims
                return program
        return None

    def _keep(self, program: Program) -> None:
        """Keep a program, and let go of one where there are many."""
        self._programs.append(program)
        self._by_signature.setdefault(program.signature, []).append(program)
        if program.sizes is not None and program.sizes.dims not in self._masks:
            self._masks.append(dict(program.sizes.dims))
        if len(self._programs) <= MAX_PROGRAMS:
            return
        # A rank that has to agree again with others must not be alone in that.
        agreed = Counter(each.agreed for each in self._programs)
        is_alone = self._spread is None or not self._spread.has_own_batches
        candidates = [
            each
            for each in self._programs
            if each is not program
            and not each.is_pending
            and (is_alone or agreed[each.agreed] > 1)
        ]
        if candidates:
            oldest = min(candidates, key=lambda each: each.last_call)
            self._programs.remove(oldest)
            self._by_signature[oldest.signature].remove(oldest)
            self._known.drop(oldest)

    def _resolve_spread(self, inventory: Inventory) -> Spread:
        if self._spread is None:
            devices = [slot.tensor.device for slot in inventory.slots]
            device = devices[0] if devices else torch.device("cpu")
            self._spread = resolve_spread(self._parallel_mode, self._asked_mesh, device)
        return self._spread


def _check_capture(name: str, number: int, reason: str) -> None:
    """Refuse a program without gradients; warn of one more where there are many."""
    if not torch.is_grad_enabled():
        raise CaptureError(
            f"compile on {name!r}: gradients are disabled here. Call the step outside "
            "torch.no_grad(); for an evaluation, put torch.no_grad() inside of the "
            "function."
        )
    if number >= MANY_PROGRAMS and number.bit_count() == 1:  # 8, 16, 32, ...
        warnings.warn(
            f"compile on {name!r}: {number} programs are captured already and this call "
            f"fits none of them, so that it is captured again, which takes as long as "
            f"many steps.\n\n{textwrap.indent(reason, '  ')}\n\nKeep what changes "
            "constant (pad batches to some shapes), pass it as a tensor (also a number "
            "that the step reads from an object or a variable and that is another one in "
            "each call: torch.tensor(x), or a float argument), count what the step does "
            "not need where it is called, or make the optimizer with foreach=True where a "
            f"schedule changes more than its lr. At most {MAX_PROGRAMS} programs are kept.",
            CaptureWarning,
            stacklevel=4,
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
