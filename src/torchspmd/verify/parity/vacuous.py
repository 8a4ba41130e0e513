"""Agreement that means nothing: dead models agree with each other."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torchspmd.verify.parity.match import largest
from torchspmd.verify.recording.files import INITIAL, Header, Key, Kind, Recording

# Other values may be infinite or NaN: a buffer that is a mask, rows of an activation.
_FINITE = (Kind.LOSS, Kind.OUTPUT, Kind.GRADIENT, Kind.PARAMETER, Kind.STATE)


@dataclass(slots=True)
class Watch:
    """What the reference did over all steps, for the judgement at the end."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, float] = field(default_factory=dict)
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    not_finite: list[str] = field(default_factory=list)
    noise: dict[str, float] = field(default_factory=dict)  # by step's largest gradient

    def is_rounding(self, name: str) -> bool:
        """Whether all that a parameter got is rounding: its gradient is zero in truth."""
        return 0 < self.gradients.get(name, 0.0) <= self.noise.get(name, 0.0)

    def note(self, step: int, key: Key, value: torch.Tensor) -> None:
        """Look at one value of the reference."""
        is_judged = key.kind in _FINITE and value.is_floating_point()
        if is_judged and not bool(value.isfinite().all()):
            self.not_finite.append(f"{key.kind.value} {key.name!r} in step {step}")
        if key.kind is Kind.LOSS and value.numel() == 1:
            self.losses.append(float(value))
        elif key.kind is Kind.GRADIENT and value.numel():
            size = largest(value)
            self.gradients[key.name] = max(self.gradients.get(key.name, 0.0), size)
        elif key.kind is Kind.PARAMETER:
            if step == INITIAL:
                self.first[key.name] = value
            elif key.name in self.first and not torch.equal(
                value, self.first[key.name]
            ):
                self.changed.add(key.name)


def find_vacuous(
    watch: Watch, reference: Header, parallel: Header, without_grad: Sequence[str]
) -> list[str]:
    """Why the runs could agree and still both be dead."""
    found = [f"not a finite number: {what}" for what in watch.not_finite[:3]]
    found += _about_loss(watch)
    trained = [name for name in watch.first if name not in reference.frozen]
    declared = [name for name in trained if is_declared(name, without_grad)]
    found += _about_gradients(watch, reference, trained, declared)
    still = [
        name
        for name in trained
        if name not in watch.changed
        and name not in declared
        and not watch.is_rounding(name)
    ]
    if trained and reference.num_steps and len(still) == len(trained):
        found.append("no parameter was changed by any step")
    elif still:
        found.append(f"never changed by a step: {_few(still)}")
    if not trained:
        found.append("the model has no parameter to train")
    if parallel.wrappers and parallel.world_size > 1 and not parallel.data_axes:
        found.append(
            f"the model is wrapped by {' and '.join(parallel.wrappers)}, but every rank "
            "got the whole batch, so that a missing reduction cannot show: name the data "
            "axis, as in mesh={'dp': 4} or data_axes=('dp',)"
        )
    return found


def rounding_notes(watch: Watch) -> list[str]:
    """Parameters whose gradient is nothing but rounding, such as the bias of a key."""
    names = [name for name in watch.gradients if watch.is_rounding(name)]
    if not names:
        return []
    return [
        f"the gradient is zero but for rounding, and its update is free: {_few(names)}"
    ]


def _about_loss(watch: Watch) -> list[str]:
    losses = watch.losses
    if not losses:
        return ["no loss was recorded"]
    if len(losses) > 1 and all(loss == losses[0] for loss in losses):
        if math.isfinite(losses[0]):
            return [f"the loss is flat: equal in all {len(losses)} steps"]
    return []


def _about_gradients(
    watch: Watch, reference: Header, trained: list[str], declared: list[str]
) -> list[str]:
    if not reference.sees_gradients:
        return [] if not trained else ["no parameter got a gradient"]
    found = []
    never = [n for n in trained if n not in watch.gradients and n not in declared]
    zero = [n for n, size in watch.gradients.items() if not size and n not in declared]
    if watch.gradients and len(zero) == len(watch.gradients):
        found.append("all gradients are zero")
    elif zero:
        found.append(f"the gradient is zero in every step: {_few(zero)}")
    if never:
        found.append(
            f"never got a gradient: {_few(never)}; if that is meant, declare it with "
            f"without_grad=({never[0]!r},)"
        )
    return found


def is_declared(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter is declared to get no gradient."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def structure_problems(
    reference: Recording, parallel: Recording, initial: Mapping[str, bool]
) -> list[tuple[str, str]]:
    """Parameters that one run has and the other has not, or ties that were cut.

    Args:
        reference: One device.
        parallel: The ranks.
        initial: For each parameter of either run, whether the parallel run has it.

    Returns:
        For each problem the parameter, and a sentence.
    """
    found = []
    kept = {names for header in parallel.headers[:1] for names in header.ties}
    for names in reference.first.ties:
        if not any(set(names) <= set(others) for others in kept):
            found.append(
                (names[0], f"{' and '.join(names)} are one parameter on one device, but "
                 "not in the parallel run: the tie was cut")
            )  # fmt: skip
    missing = [name for name, is_there in initial.items() if not is_there]
    found += [(name, "the parallel run has no such parameter") for name in missing]
    return found


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
