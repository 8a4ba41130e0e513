"""``compile``: the public way in."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypedDict,
    Unpack,
    get_args,
    overload,
)

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from torchspmd.errors import UsageError
from torchspmd.step.build import StepOptions
from torchspmd.step.capture.override import Override, Overrides
from torchspmd.step.compiled import CompiledStep, name_of_step
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.modes.data_parallel import DataParallel
from torchspmd.step.modes.precision import policy_problems
from torchspmd.step.passes.pipeline import (
    GraphModuleTransformation,
    Overlap,
    Pass,
    is_list_of_passes,
)
from torchspmd.step.runtime import current_runtime
from torchspmd.step.shadow.check import ShadowPlan, wrong_environment
from torchspmd.step.virtual.verify import Verification

if TYPE_CHECKING:  # importing it registers operators
    from torch.distributed.fsdp import MixedPrecisionPolicy

Transformation = Callable[[fx.GraphModule], Any]
Backend = Literal["graph", "inductor", "cudagraph", "auto"]
Parallel = Literal["replicate", "fully_shard"]
Cost = CostModel | Literal["measure"]

_GLOBAL_BATCH = "None for the result of one device on the batches of all ranks together"


class _Options(TypedDict, total=False):
    """The options of ``compile``, for type checkers."""

    parallel: Parallel | DataParallel | None
    passes: bool | Sequence[Pass] | None
    overlap: Overlap | None
    cost: Cost | None
    backend: Backend | None
    mp_policy: "MixedPrecisionPolicy | None"
    mesh: DeviceMesh | None
    verify: bool | Verification
    shadow: int | None
    shadow_every: int | None
    module_override: Sequence[Override]
    parallel_mode: DataParallel | None
    gm_transformation: Transformation | None


@overload
def compile(
    func: Callable[..., Any], /, **options: Unpack[_Options]
) -> CompiledStep: ...


@overload
def compile(
    func: None = None, /, **options: Unpack[_Options]
) -> Callable[[Callable[..., Any]], CompiledStep]: ...


def compile(  # noqa: PLR0913 - one for each choice
    func: Callable[..., Any] | None = None,
    /,
    *,
    parallel: Parallel | DataParallel | None = None,
    passes: bool | Sequence[Pass] | None = None,
    overlap: Overlap | None = None,
    cost: Cost | None = None,
    backend: Backend | None = None,
    mp_policy: "MixedPrecisionPolicy | None" = None,
    mesh: DeviceMesh | None = None,
    verify: bool | Verification = False,
    shadow: int | None = None,
    shadow_every: int | None = None,
    module_override: Sequence[Override] = (),
    parallel_mode: DataParallel | None = None,
    gm_transformation: Transformation | None = None,
) -> CompiledStep | Callable[[Callable[..., Any]], CompiledStep]:
    """Capture a whole training step as one graph, and run that.

    Forward, loss, backward and optimizer become one functional graph. Parameters, buffers
    and optimizer state go in and their new values are written back into your own tensors
    after each step, so eager code, checkpoints and evaluation see the truth.

    Args:
        func: The step: takes modules, optimizers and tensors anywhere in its arguments.
        parallel: ``"replicate"``: each rank has its own batch and gradients are averaged,
            as DistributedDataParallel does. ``"fully_shard"``: the same, with parameters
            and optimizer state in shards. A ``DataParallel`` says more about either. None
            for the result of one device on the batches of all ranks together.
        passes: Whether to fuse and schedule the communication, or a list of passes, each
            called with the ``IterGraphModule``. On by default where ``parallel`` is given.
        overlap: Whether updates may wait for the next step, so that reductions overlap
            with its forward. ``"auto"``, the default with passes and replicas: where the
            simulation says that the step is faster by 5 %. True: wherever that is legal.
            With ``"fully_shard"`` nothing waits unless asked for: gradients that wait
            take memory, and parameters are gathered first thing. End a run with
            ``last_train_step=True``, ``flush()``, or use the step as a context manager.
        cost: The rates by which the passes choose the size of buckets, the order of
            deferred reductions and, with ``overlap="auto"``, whether to defer at all.
            ``"measure"`` measures them on the ranks that compile, with the operators of the
            captured step, which takes some seconds; a ``CostModel`` states them, the same
            on all ranks. A coarse guess for the kind of device by default.
        backend: ``"graph"``, the default, runs generated Python, ``"inductor"`` compiled
            code, ``"cudagraph"`` replays what was launched once. ``"auto"`` times the
            first two in the first calls of each program and keeps the faster one.
        mp_policy: With ``parallel="fully_shard"``, torch's ``MixedPrecisionPolicy``: the
            dtypes in which parameters are gathered and gradients reduced, as for FSDP2's
            ``fully_shard(model, mp_policy=...)``.
        mesh: The data axis, a mesh of one axis; all ranks when there is a process group.
            For ``"fully_shard"`` also one of two: the second has shards, the first
            replicas of them.
        verify: Run the graphs before and after each pass on virtual ranks and compare them
            bit for bit; a ``Verification`` says on how many and how long.
        shadow: How many calls after each capture are also made eagerly, on copies, and
            compared: a difference is an error on every rank. 3 by default where memory
            allows, every call with ``TORCHSPMD_CHECK=1`` in the environment; 0 for none.
        shadow_every: After how many calls to do that again; never by default.
        module_override: Stand-ins for modules while the step is captured; see
            ``Override``. Each module is offered once, the model itself too.
        parallel_mode: The same as ``parallel``, as a ``DataParallel``, without passes.
        gm_transformation: Called with the captured ``fx.GraphModule``; what it returns is
            run instead. In the place of ``passes``, ``overlap`` and ``cost``; see
            ``GraphModuleTransformation``.

    Returns:
        The compiled step, or a decorator when ``func`` is not given.

    Example:
        >>> import torch
        >>> @compile
        ... def train_step(model, optim, batch):
        ...     loss = model(batch).square().mean()
        ...     loss.backward()
        ...     optim.step()
        ...     optim.zero_grad()
        ...     return loss
        >>> model = torch.nn.Linear(4, 2)
        >>> optim = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> losses = [train_step(model, optim, torch.ones(3, 4)) for _ in range(3)]
        >>> bool(losses[2] < losses[0])
        True
        >>> len(train_step.programs)
        1
    """
    asked = _Asked(
        parallel=parallel,
        parallel_mode=parallel_mode,
        passes=passes,
        overlap=overlap,
        cost=cost,
        backend=backend,
        gm_transformation=gm_transformation,
        mp_policy=mp_policy,
        mesh=mesh,
        verify=verify,
    )
    problems = [
        *asked.wrong_values(),
        *_wrong_shadow(shadow, shadow_every, module_override),
    ]
    if problems := problems or [*asked.contradictions()]:
        raise UsageError("\n".join(problems))

    def wrap(function: Callable[..., Any]) -> CompiledStep:
        if not callable(function):
            raise UsageError(
                f"compile: {type(function).__name__} cannot be called. Decorate the "
                "function of your training step."
            )
        _check_function(function)
        options = StepOptions(
            function,
            name_of_step(function),
            transformation=asked.make_transformation(),
            mode=asked.mode,
            mesh=mesh,
            backend=asked.resolved_backend,
            overrides=Overrides(module_override),
            verify=Verification() if verify is True else verify or None,
            shadow=current_runtime().shadow_plan(ShadowPlan.of(shadow, shadow_every)),
        )
        return CompiledStep(options)

    return wrap if func is None else wrap(func)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options of ``compile`` that depend on each other."""

    parallel: Any
    parallel_mode: Any
    passes: Any
    overlap: Any
    cost: Any
    backend: Any
    gm_transformation: Any
    mp_policy: Any
    mesh: Any
    verify: Any

    @property
    def mode(self) -> DataParallel | None:
        """How the step is spread over ranks."""
        found: DataParallel | None = self.parallel_mode
        if isinstance(self.parallel, str):
            found = DataParallel(self.parallel, mp_policy=self.mp_policy)
        elif self.parallel is not None:
            found = self.parallel
        return found

    @property
    def resolved_backend(self) -> str:
        """What runs the graph."""
        return self.backend or ("inductor" if self._wants_inductor else "graph")

    @property
    def _wants_inductor(self) -> bool:
        given = self.gm_transformation
        return isinstance(given, GraphModuleTransformation) and given.enable_inductor

    @property
    def _runs_passes(self) -> bool:
        if self.passes is not None:
            return self.passes is not False
        return self.parallel is not None and self.gm_transformation is None

    @property
    def _is_sharded(self) -> bool:
        return self.mode is not None and self.mode.parallel_style == "fully_shard"

    @property
    def _cannot_overlap(self) -> str:
        """Why updates cannot wait for the next step; empty where they can."""
        if self.resolved_backend == "cudagraph":
            return (
                "backend='cudagraph' replays one graph in which every collective ends"
            )
        return ""

    def wrong_values(self) -> Iterator[str]:
        """Options that have no such value."""
        modes, backends = get_args(Parallel), get_args(Backend)
        spread = f"a DataParallel, or {_GLOBAL_BATCH}"
        functions = "functions, each called with the IterGraphModule"
        rules = {
            "parallel": (
                self.parallel in (None, *modes)
                or isinstance(self.parallel, DataParallel),
                f"pass {', '.join(map(repr, modes))}, {spread}",
            ),
            "parallel_mode": (
                isinstance(self.parallel_mode, DataParallel | None),
                f"pass {spread}",
            ),
            "passes": (
                isinstance(self.passes, bool | None) or is_list_of_passes(self.passes),
                f"pass True, False or a list of {functions}",
            ),
            "overlap": (
                self.overlap in (None, "auto") or isinstance(self.overlap, bool),
                "pass True, False or 'auto'",
            ),
            "cost": (
                self.cost in (None, "measure") or isinstance(self.cost, CostModel),
                "pass a CostModel, 'measure', or None for a guess",
            ),
            "backend": (
                self.backend in (None, *backends),
                f"choose among {', '.join(backends)}",
            ),
            "gm_transformation": (
                self.gm_transformation is None or callable(self.gm_transformation),
                "pass a function of the captured graph module, or a "
                "GraphModuleTransformation",
            ),
            "mesh": (
                isinstance(self.mesh, DeviceMesh | None),
                "pass a DeviceMesh, for instance of init_device_mesh(), or None for all "
                "ranks",
            ),
            "verify": (
                isinstance(self.verify, bool | Verification),
                "pass True, False or a Verification",
            ),
        }
        for name, (is_right, rule) in rules.items():
            if not is_right:
                yield f"compile({name}={getattr(self, name)!r}): {rule}."
        if self.mp_policy is not None:
            yield from self._wrong_policy()

    def _wrong_policy(self) -> Iterator[str]:
        if self.parallel != "fully_shard":
            yield (
                "compile(mp_policy=...): it goes with parallel='fully_shard'. Pass that, "
                "or give the policy to the DataParallel, DataParallel('fully_shard', "
                "mp_policy=...)."
            )
        yield from (f"compile: {each}." for each in policy_problems(self.mp_policy))

    def contradictions(self) -> Iterator[str]:
        """Options that do not go together, or would have no effect."""
        if self.parallel is not None and self.parallel_mode is not None:
            yield (
                "compile(parallel=..., parallel_mode=...): both say how the step is spread "
                "over ranks. Pass parallel alone."
            )
        options = ("passes", "overlap", "cost")
        chosen = [name for name in options if getattr(self, name) is not None]
        if chosen and self.gm_transformation is not None:
            yield (
                f"compile({', '.join(chosen)}=..., gm_transformation=...): the "
                "transformation says which passes run. Leave it out, or set the options "
                "of GraphModuleTransformation instead."
            )
            return
        if self._wants_inductor and self.backend not in (None, "inductor"):
            yield (
                f"compile(backend={self.backend!r}, gm_transformation="
                "GraphModuleTransformation(enable_inductor=True)): these are two backends. "
                "Leave out enable_inductor, or pass backend='inductor'."
            )
        given = {}
        if self.overlap:
            given[f"overlap={self.overlap!r}"] = "Add defer_updates to the list."
        if self.cost is not None:
            given["cost=..."] = "Give it to those passes that take a cost."
        for option, instead in given.items():
            if not self._runs_passes:
                yield (
                    f"compile({option}) would have no effect without passes. Set "
                    "parallel='replicate', or passes=True."
                )
            elif not isinstance(self.passes, bool | None):
                yield (
                    f"compile({option}, passes=[...]) would have no effect: it is for the "
                    f"default passes alone. {instead}"
                )
        if self.overlap and self._runs_passes and self._cannot_overlap:
            yield (
                f"compile(overlap={self.overlap!r}) is not available: "
                f"{self._cannot_overlap}."
            )

    def make_transformation(self) -> Transformation | None:
        """What is done to each captured graph."""
        if not self._runs_passes:
            given: Transformation | None = self.gm_transformation
            return given
        if not isinstance(self.passes, bool | None):
            return GraphModuleTransformation(passes=self.passes)
        overlap: Overlap = False if self._is_sharded else "auto"
        overlap = overlap if self.overlap is None else self.overlap
        if self._cannot_overlap:
            overlap = False
        return GraphModuleTransformation.by_default(overlap, self.cost)


def _wrong_shadow(shadow: object, every: object, overrides: object) -> Iterator[str]:
    if shadow is None:
        yield from wrong_environment()
    elif type(shadow) is not int or shadow < 0:
        yield (
            f"compile(shadow={shadow!r}): pass how many calls after each capture are also "
            "made eagerly and compared, 0 for none."
        )
    if every is not None and (type(every) is not int or every < 1):
        yield (
            f"compile(shadow_every={every!r}): pass after how many calls some are made "
            "eagerly again, at least 1."
        )
    elif every is not None and shadow == 0:
        yield (
            "compile(shadow=0, shadow_every=...): nothing would be compared. Leave out "
            "one of them."
        )
    named = {"shadow": shadow or None, "shadow_every": every}
    asked = [name for name, value in named.items() if value is not None]
    if asked and overrides:
        yield (
            f"compile({', '.join(asked)}=..., module_override=...): modules that have "
            "stand-ins compute something else eagerly, so that nothing would be compared. "
            f"Leave out {' and '.join(asked)}, or the stand-ins."
        )


def _check_function(function: Callable[..., Any]) -> None:
    """Refuse functions that cannot be captured as one step."""
    name = name_of_step(function)
    if isinstance(function, CompiledStep):
        raise UsageError(
            f"compile on {name!r}: it is compiled already. Pass the function itself, and "
            "all options in one call of compile."
        )
    plain = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    for is_kind, kind in _NO_STEPS.items():
        if is_kind(plain):
            raise UsageError(
                f"compile on {name!r}: a step that is {kind} does its work after the call, "
                "so that nothing of it would be captured. Make it a plain function that "
                "runs one step and returns its results."
            )
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    if "last_train_step" in parameters:
        raise UsageError(
            f"compile on {name!r}: the step has a parameter last_train_step, which a "
            "compiled step takes for itself (nothing is left for a next step), so that "
            "yours would never get a value. Give your parameter another name."
        )


_NO_STEPS = {
    inspect.iscoroutinefunction: "a coroutine (async def)",
    inspect.isgeneratorfunction: "a generator (yield)",
    inspect.isasyncgenfunction: "an asynchronous generator",
}
