"""What a compiled call left beside what the eager one left: differences and causes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchspmd import _torch
from torchspmd.layout.rounding import Tolerance, choose_tolerance
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.parallel_mode import ParallelMode
from torchspmd.step.capture.snapshots import MISSING
from torchspmd.step.modes.global_batch import GlobalBatch
from torchspmd.step.program import Program
from torchspmd.step.shadow.eager import Eager, Expected, Following, Kind

_ORDER = tuple(Kind)
_OF_ONE = 0.01  # a mean of values that a norm has made, around 1, is rounding alone
_OWN_ROUNDINGS = 4.0  # of a value itself, when a change is added to it
_NOISE = 16.0  # times the tolerance: gradients below that, of the largest, are rounding
_OF_SQUARES = 2.0  # an optimizer may keep squares of gradients
_PERTURBED = 16.0  # times what other last bits of the parameters change
_FOLLOWING = 16.0  # times what updated parameters differ by, for what is made of them
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is other than after the eager step.

    Attributes:
        kind: What it is.
        name: Its name.
        amount: By how much, as text.
        is_unwritten: It is as it was before the step.
        following: By how much it differs, where it is computed from updated parameters.
    """

    kind: Kind | str
    name: str
    amount: str
    is_unwritten: bool = False
    following: float = math.inf

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip() + self.amount


@dataclass(slots=True)
class Outcome:
    """What came of comparing one call.

    Attributes:
        differences: What differs, in the order in which a step makes it.
        compared: How many values were compared.
        largest: The largest difference that counts as rounding, relative.
        noise: How many elements were left out because their gradient is rounding.
        moved: The largest difference of a parameter that counts as rounding.
    """

    differences: list[Difference] = field(default_factory=list)
    compared: int = 0
    largest: float = 0.0
    noise: int = 0
    moved: float = 0.0

    def drop_following(self) -> None:
        """Leave out what differs as updated parameters do, from which it is computed.

        An optimizer may make a whole step of a gradient that is rounding alone.
        """
        allowed = _FOLLOWING * self.moved
        self.differences = [
            each for each in self.differences if not each.following <= allowed
        ]


@dataclass(frozen=True, slots=True)
class Amplified:
    """How far other last bits of the parameters carry: some steps amplify rounding.

    A norm after a bias leaves of the bias's gradient nothing but rounding, of terms that
    no gradient shows; a norm over values that are nearly alike makes large ones of it.

    Attributes:
        gradients: The largest change of a gradient's element, by slot.
        values: The same of all that a step leaves and returns, by kind and name.
    """

    gradients: Mapping[int, float] = field(default_factory=dict)
    values: Mapping[tuple[Kind, str], float] = field(default_factory=dict)

    @classmethod
    def between(cls, eager: Eager, perturbed: Eager) -> "Amplified":
        """What differs between two eager calls; nothing where either failed."""
        if eager.error is not None or perturbed.error is not None:
            return cls()
        with torch.no_grad():
            gradients = {
                slot: _largest_change(value, perturbed.sums.get(slot))
                for slot, value in eager.sums.items()
            }
            left = {(each.kind, each.name): each.value for each in perturbed.values}
            returned = dict(_leaves(perturbed.results))
            left.update({(Kind.RESULT, path): each for path, each in returned.items()})
            before = [((each.kind, each.name), each.value) for each in eager.values]
            before += [
                ((Kind.RESULT, path), each) for path, each in _leaves(eager.results)
            ]
            values = {key: _largest_change(each, left.get(key)) for key, each in before}
        return cls(gradients, values)


def _largest_change(one: Any, other: Any) -> float:
    """Of an element that is finite in both; 0 for what cannot be compared."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return 0.0
    one, other = _torch.plain_tensor(one), _torch.plain_tensor(other)
    if one.shape != other.shape or not one.is_floating_point():
        return 0.0
    apart = (one - other).abs()
    apart = apart[apart.isfinite()]
    return float(apart.amax()) if apart.numel() else 0.0


@dataclass(frozen=True)
class Rounding:
    """How much counts as rounding.

    Attributes:
        tolerance: Relative to a value, or to the change of a parameter.
        chained: How many eager calls built on each other.
        eager: The eager call.
        following: What the step computes from parameters that it has updated.
        amplified: How much of it the step amplifies.
    """

    tolerance: Tolerance
    chained: int
    eager: Eager
    following: Following
    amplified: Amplified = field(default_factory=Amplified)

    @property
    def relative(self) -> float:
        """What is allowed."""
        return self.tolerance.at(self.chained)

    @functools.cached_property
    def largest(self) -> float:
        """The largest gradient: others are as inexact as this one is."""
        sizes = self.eager.gradients.values()
        largest = [float(each.amax()) for each in sizes if each.numel()]
        return max(filter(math.isfinite, largest), default=0.0)

    def inexactness(self, owner: int, like: torch.Tensor) -> torch.Tensor | None:
        """By how much more each element of what follows from a gradient is inexact.

        The errors of small gradients are those of the largest one, or what other last
        bits of the parameters show.
        """
        size = self.eager.gradients.get(owner)
        if size is None or size.shape != like.shape or not self.largest:
            return None
        measured = _PERTURBED * self.amplified.gradients.get(owner, 0.0)
        error = max(self.largest, measured / self.relative)
        return (error / size.to(like.device, like.dtype)).clamp(min=1.0)


# Times the tolerance of check_parity, which is for one step of a whole model.
_INEXACT = 64.0  # sums are taken in another order
_SAME_KERNELS = 4.0
_LOW_PRECISION = 1e-4


def has_same_kernels(inventory: Inventory, mode: ParallelMode, backend: str) -> bool:
    """Whether a compiled call rounds as an eager one does, but for its reductions.

    Kernels of a GPU may add in another order in each run.
    """
    is_on_cpu = all(slot.tensor.device.type == "cpu" for slot in inventory.slots)
    return is_on_cpu and backend != "inductor" and not isinstance(mode, GlobalBatch)


def tolerance_of(
    program: Program, inventory: Inventory, mode: ParallelMode
) -> Tolerance:
    """What counts as rounding: little where the graph does eager's own operations."""
    dtypes = [slot.tensor.dtype for slot in inventory.slots]
    for node in program.graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            dtypes.append(value.dtype)
    floating = [each for each in dtypes if each.is_floating_point]
    coarsest = max(floating, key=lambda d: torch.finfo(d).eps, default=torch.float32)
    size = 1 if mode.mesh is None else mode.mesh.size()
    if size == 1 and has_same_kernels(inventory, mode, program.backend):
        return choose_tolerance(coarsest, 1)
    wide = choose_tolerance(coarsest, sum(1 for _ in inventory.named_modules()))
    if torch.finfo(coarsest).eps > _LOW_PRECISION:
        return wide
    is_sum_alike = program.backend != "inductor" and not isinstance(mode, GlobalBatch)
    factor = _SAME_KERNELS if is_sum_alike and size == 1 else _INEXACT
    return Tolerance(min(factor * wide.relative, 0.3), wide.reason)


def compare_values(
    values: Sequence[Expected], rounding: Rounding, outcome: Outcome
) -> None:
    """Compare what is in tensors and optimizers now with what it should be."""
    with torch.no_grad():
        for each in sorted(values, key=lambda value: _ORDER.index(value.kind)):
            outcome.compared += 1
            now = each.read()
            if isinstance(now, torch.Tensor):
                now = _torch.plain_tensor(now).detach()
            found = _compare(each, now, rounding, outcome)
            if found is not None:
                outcome.differences.append(found)


def compare_returned(
    eager: Any, compiled: Any, rounding: Rounding, outcome: Outcome, own: "OwnRows"
) -> None:
    """Compare what both returned, leaf by leaf."""
    wanted, found = list(_leaves(eager)), list(_leaves(compiled))
    if [path for path, _ in wanted] != [path for path, _ in found]:
        text = f": {len(wanted)} eagerly, {len(found)} from the compiled step"
        outcome.differences.append(Difference(Kind.RESULT, "leaves", text))
        return
    for (path, value), (_, now) in zip(wanted, found, strict=True):
        outcome.compared += 1
        part = value
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
            part = own.of(value.detach(), now)
            if part is None:
                continue  # a layout that says nothing about one rank's rows
        each = Expected(Kind.RESULT, path, part, lambda: None)
        difference = _compare(each, now, rounding, outcome)
        if difference is not None:
            outcome.differences.append(difference)


@dataclass(frozen=True, slots=True)
class OwnRows:
    """This rank's part of a value of the global batch; of others the value itself."""

    rank: int = 0
    size: int = 1

    def of(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
        """The part that has the form of ``like``; None where there is none."""
        value = _torch.plain_tensor(value)
        if value.shape == like.shape or self.size == 1:
            return value
        sizes = zip(value.shape, like.shape, strict=False)
        dims = [dim for dim, (all_, own) in enumerate(sizes) if all_ != own]
        if value.ndim != like.ndim or len(dims) != 1:
            return None
        (dim,) = dims
        own = like.shape[dim]
        if value.shape[dim] != own * self.size:
            return None
        return value.narrow(dim, self.rank * own, own)


def own_rows(mode: ParallelMode) -> OwnRows:
    """Which part of a value of the global batch this rank has."""
    if not isinstance(mode, GlobalBatch):
        return OwnRows()
    return OwnRows(mode.mesh.get_local_rank(), mode.mesh.size())


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    leaves, _ = _torch.flatten_tree(value)
    paths = _torch.leaf_paths(value)
    for path, leaf in zip(paths, leaves, strict=True):
        name = "".join(f"[{step!r}]" for step in path)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for part in dataclasses.fields(leaf):
                for inner, item in _leaves(getattr(leaf, part.name, None)):
                    yield f"{name}.{part.name}{inner}", item
        else:
            yield name, leaf


def _compare(
    wanted: Expected, found: Any, rounding: Rounding, outcome: Outcome
) -> Difference | None:
    def differs(
        text: str, *, is_unwritten: bool = False, following: float = math.inf
    ) -> Difference:
        return Difference(wanted.kind, wanted.name, text, is_unwritten, following)

    value = wanted.value
    if not isinstance(value, torch.Tensor) or not isinstance(found, torch.Tensor):
        return None if _is_same(value, found) else differs(_described(value, found))
    if value.shape != found.shape or value.dtype != found.dtype:
        return differs(f": {_form(value)} eagerly, {_form(found)} here")
    if value.device != found.device:
        found = found.to(value.device)
    if torch.equal(value, found):
        return None
    if not (value.is_floating_point() or value.is_complex()):
        count = int((value != found).sum())
        return differs(f": {count} of {value.numel()} elements differ")
    return _compare_floats(wanted, found, rounding, outcome, differs)


def _compare_floats(
    wanted: Expected,
    found: torch.Tensor,
    rounding: Rounding,
    outcome: Outcome,
    differs: Callable[..., Difference],
) -> Difference | None:
    value: torch.Tensor = wanted.value
    wide = torch.promote_types(value.dtype, torch.float32)
    value, found = value.to(wide), found.to(wide)
    apart = (value - found).abs()
    # Which kind of overflow a sum gives, inf or NaN, depends on its order.
    is_same = (value == found) | ~(value.isfinite() | found.isfinite())
    apart[is_same] = 0.0
    size = (
        float(value[value.isfinite()].abs().amax()) if value.isfinite().any() else 0.0
    )
    change = wanted.change if wanted.change is not None else math.inf
    is_update = wanted.kind is Kind.PARAMETER and math.isfinite(change)
    scale = change if is_update else size
    own = _OWN_ROUNDINGS * torch.finfo(wanted.value.dtype).eps * size
    if wanted.kind in (Kind.BUFFER, Kind.RESULT):
        own += _OF_ONE * rounding.relative
    relative = rounding.relative
    if wanted.kind is Kind.STATE:
        relative *= _OF_SQUARES
    allowed = relative * scale + own
    factor = rounding.inexactness(wanted.owner, apart)
    if factor is None:
        measured = rounding.amplified.values.get((wanted.kind, wanted.name), 0.0)
        is_wrong = ~(apart <= allowed + _PERTURBED * measured)
    else:
        is_wrong = ~(apart <= relative * scale * factor + own)
        is_noise = factor * (_NOISE * relative) >= 1.0
        outcome.noise += int((is_wrong & is_noise).sum())
        is_wrong &= ~is_noise
    is_wrong &= ~is_same  # sizes of gradients may be NaN
    if not is_wrong.any():
        worst = float(apart[apart.isfinite()].amax()) if apart.isfinite().any() else 0.0
        if wanted.kind is Kind.PARAMETER:
            outcome.moved = max(outcome.moved, worst)
        outcome.largest = max(outcome.largest, worst / size if size else 0.0)
        return None
    worst = float(apart[is_wrong].nan_to_num(math.inf, math.inf).amax())
    if not scale or not math.isfinite(worst):
        return differs(": other values")
    of = "what the step changes it by" if is_update else "its size"
    is_unwritten = math.isfinite(change) and abs(worst - change) <= 1e-3 * change
    return differs(
        f" differs by {worst / scale:.2g} of {of}; {allowed / scale:.2g} is allowed",
        is_unwritten=is_unwritten,
        following=worst if rounding.following.holds(wanted) else math.inf,
    )


def _is_same(value: Any, found: Any) -> bool:
    if value is found:
        return True
    if isinstance(value, torch.Tensor) or isinstance(found, torch.Tensor):
        # A number that a step returns may come as a tensor of the graph, or the reverse.
        return False
    try:
        if value != value and found != found:  # noqa: PLR0124  # NaN
            return True
        if isinstance(value, float) and isinstance(found, (int, float)):
            return math.isclose(value, found, rel_tol=1e-6, abs_tol=1e-12)
        has_value = isinstance(value, _PLAIN) or type(value) in (tuple, list, dict, set)
        return bool(value == found) or not has_value
    except Exception:  # an object that cannot be compared says nothing
        return True


_PLAIN = (bool, int, float, str, type(None))


def _described(value: Any, found: Any) -> str:
    return f": {_short(value)} eagerly, {_short(found)} from the compiled step"


def _short(value: Any) -> str:
    if value is MISSING:
        return "not there"
    if isinstance(value, torch.Tensor):
        return f"a tensor {_form(value)}"
    if isinstance(value, _PLAIN):
        return repr(value)[:40]
    return f"a {type(value).__name__}"


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# ----------------------------------------------------------------------------
# Why they differ.


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known beside the differences.

    Attributes:
        eager: The eager call.
        draws_differ: Whether both left random generators in other states.
        numbers: Numbers that are other than when the program was captured, as text.
        is_first: Whether it is the first call of its program.
    """

    eager: Eager
    draws_differ: bool
    numbers: Sequence[str]
    is_first: bool


_UPDATES = (Kind.STATE, Kind.PARAMETER)
_ALONE = (
    "Compile with passes=False, then overlap=False, then backend='graph', to see which "
    "part does it, and report it; shadow=0 runs the step as it is"
)


def likely_cause(
    differences: Sequence[Difference], evidence: Evidence
) -> tuple[str, str]:
    """The likely cause and what to do, from the pattern of the differences."""
    kinds = {each.kind for each in differences}
    if kinds == {Kind.REPLICA}:
        return (
            "something writes to the parameters of one rank alone, or a gradient is not "
            "reduced: replicas that start alike and get the same updates stay alike",
            "Give every rank the same parameters (broadcast them from one rank), and "
            "change them on all ranks alike",
        )
    if evidence.eager.error is not None:
        return (
            "a Python value that the step reads has changed since it was captured, where "
            "no guard sees it, so that the step would raise now",
            "Make the check outside of the step, or pass the value as an argument",
        )
    if evidence.eager.changes:
        return (
            "an effect that happens only at capture: "
            + ", ".join(evidence.eager.changes[:_SHOWN]),
            "Do it outside of the step, keep it in a buffer, or return what is needed for "
            "it",
        )
    if evidence.draws_differ:
        return (
            "a random draw that is made once, at capture, or not as often as eagerly",
            "Draw with torch's operators on tensors inside the step, or draw outside and "
            "pass what was drawn",
        )
    if kinds <= {*_UPDATES} and evidence.numbers:
        return (
            "a schedule that has no effect: since capture "
            + ", ".join(evidence.numbers[:_SHOWN]),
            "Keep the hyper-parameter as a tensor (lr=torch.tensor(0.1)), or call close() "
            f"and compile again when it changes. {_ALONE}",
        )
    unwritten = [each.name for each in differences if each.is_unwritten]
    if unwritten and len(unwritten) == len(differences):
        return (f"a state that is not written: {', '.join(unwritten[:_SHOWN])}", _ALONE)
    if evidence.is_first:
        return ("the captured graph computes something else than the step", _ALONE)
    return (
        "a Python value that the step reads has changed since it was captured, where no "
        "guard sees it (the environment, a file, an object of an installed package)",
        "Pass it as a float argument or a tensor, or call close() and compile again "
        "after the change",
    )
