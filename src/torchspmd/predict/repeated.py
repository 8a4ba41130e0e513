"""Repeated blocks are rehearsed twice, not all of them: the difference is extended.

What a block takes and holds is the same for each of them, so that the figures of a model
are affine in their number: from two rehearsals with few blocks follow those with many.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torchspmd.errors import UsageError
from torchspmd.predict.memory import Fits, verdict
from torchspmd.predict.power import Power
from torchspmd.predict.ranking import Outcome
from torchspmd.predict.space import Candidate, Space, Value

__all__ = ["Repeated", "extend", "of_worst_stage"]

FEW = (2, 4)  # the first and last block may differ from the others: not one and two
_ALIKE = 0.02  # of the whole rehearsal: what an extended one may be off

_KEPT = frozenset(
    {
        "mfu",
        "step_error",
        "fragmentation",
        "device_bytes",
        "idle",
        "limit",
        "behind",
        "first_failure",
    }
)

# Lists of what few blocks have; a figure for each block of the whole model is not known.
_OF_FEW = ("exposed", "modules", "mesh", "ledger")


class Repeated(NamedTuple):
    """Which argument of a space is a number of equal blocks.

    Attributes:
        name: Of the argument.
        space: That it is swept in.
        counts: Of a candidate's values: the two numbers that are rehearsed.
    """

    name: str
    space: Space
    counts: Callable[[Mapping[str, Value]], tuple[int, int]] = lambda values: FEW

    def whole(self, candidate: Candidate) -> int:
        """How many blocks it has.

        Raises:
            UsageError: The argument is no such number.
        """
        value = candidate.values[self.name]
        if not isinstance(value, int) or value < 1:
            raise UsageError(
                f"{self.name}={value}: an argument to repeat is a number of blocks, 1 or "
                "more."
            )
        return value

    def rehearsed(self, candidate: Candidate) -> tuple[Candidate, ...]:
        """With few blocks, twice; or as it is, where it has no more."""
        counts = self.counts(candidate.values)
        if self.whole(candidate) <= max(counts):
            return (candidate,)
        several = ({**candidate.values, self.name: count} for count in counts)
        return tuple(map(self.space.candidate, several))

    def outcome(
        self, candidate: Candidate, found: Mapping[tuple[object, ...], Outcome]
    ) -> Outcome:
        """Of all blocks, from the outcomes with few of them by ``key``."""
        points = self.rehearsed(candidate)
        outcomes = [found[key(point)] for point in points]
        problem = next((each.problem for each in outcomes if each.problem), "")
        if problem or len(outcomes) == 1:
            return Outcome(candidate, outcomes[0].prediction, problem=problem)
        few, more = outcomes
        whole = self.whole(candidate)
        counts = self.counts(candidate.values)
        return Outcome(
            candidate, extend(few.prediction, more.prediction, counts, whole)
        )


def key(candidate: Candidate) -> tuple[object, ...]:
    """What tells candidates apart."""
    return (*candidate.words, *sorted(candidate.values.items()))


def how_far_off(extended: Outcome, whole: Outcome) -> str:
    """What a rehearsal of all blocks says of the extended one."""
    what = f"{extended.candidate}, rehearsed with all blocks"
    if whole.problem:
        return f"{what}: {whole.problem}"
    if not whole.fits:
        return f"{what}: it does not fit"
    time = extended.seconds / whole.seconds - 1 if whole.seconds else 0.0
    memory = extended.nbytes / whole.nbytes - 1 if whole.nbytes else 0.0
    advice = ""
    if max(abs(time), abs(memory)) > _ALIKE:
        advice = "; its blocks are not alike: search without repeating them"
    return f"{what}: extended, the step is {time:+.1%} and memory {memory:+.1%} off{advice}"


def unique(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Each once, in their order."""
    return list({key(each): each for each in candidates}.values())


def extend(
    few: Mapping[str, Any], more: Mapping[str, Any], counts: tuple[int, int], to: int
) -> dict[str, Any]:
    """The prediction for ``to`` blocks from those for ``counts`` of them.

    Args:
        few: Keys of a prediction file, with the smaller number of blocks.
        more: The same, with the larger one.
        counts: Blocks of each.
        to: Blocks of the whole model.
    """
    times = (to - counts[0]) / (counts[1] - counts[0])
    result: dict[str, Any] = _extend(few, more, times)
    for name in _OF_FEW:
        result.pop(name, None)
    if result.get("power") and result.get("step_seconds"):
        _set_clock(result, few, more, times)
    seconds, flops = result.get("step_seconds"), result.get("model_flops")
    if seconds and flops and more.get("mfu") and more.get("step_seconds"):
        peak = more["model_flops"] / more["step_seconds"] / more["mfu"]
        result["mfu"] = flops / seconds / peak
    memory = result.get("memory")
    if memory and memory.get("device_bytes"):
        result["fits"] = _fits(memory, few["memory"], more["memory"]).value
    for rank, stage in (result.get("stages") or {}).items():
        before, after = (each["stages"].get(rank) or {} for each in (few, more))
        if stage.get("memory") and before.get("memory"):
            memories = (each["memory"] for each in (stage, before, after))
            stage["fits"] = _fits(*memories).value
    return result


def of_worst_stage(prediction: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same prediction, with the memory of the stage of a pipeline that needs most."""
    stages = (prediction.get("stages") or {}).values()
    known = [stage for stage in stages if stage.get("memory")]
    if not known:
        return prediction
    worst = min(known, key=lambda stage: float(stage["memory"]["margin_bytes"]))
    memory = {**(prediction.get("memory") or {}), **worst["memory"]}
    return {**prediction, "fits": worst["fits"], "memory": memory}


def _fits(
    memory: dict[str, Any], few: Mapping[str, Any], more: Mapping[str, Any]
) -> Fits:
    """Whether it fits; sets what is reserved, which is not affine on a full device.

    There the allocator gives back what nobody uses, and tries again. So a model whose
    tensors fit, but not what would be reserved on a larger device, is at risk; and where
    few blocks run out of memory, only what is allocated can be extended.
    """
    outside = more["device_peak_bytes"] - more["reserved_peak_bytes"]
    room = memory["device_bytes"] - outside
    reserved = memory["reserved_peak_bytes"]
    allocated = memory.get("allocated_peak_bytes", reserved)
    # Few blocks find room in what is reserved for something larger, such as a loss; the
    # others do not, and what is reserved beside tensors does not become less.
    beside = more["reserved_peak_bytes"] - more.get("allocated_peak_bytes", 0)
    if "allocated_peak_bytes" in more:
        reserved = max(reserved, allocated + beside)
    if few.get("first_failure") or more.get("first_failure"):
        reserved = max(
            allocated, few["reserved_peak_bytes"], more["reserved_peak_bytes"]
        )
        fits = Fits.NO
    elif allocated <= room < reserved:
        reserved, fits = room, Fits.AT_RISK
    else:
        reserved = max(allocated, reserved)
        fits = verdict(room - reserved, reserved)
    memory["reserved_peak_bytes"] = reserved
    memory["device_peak_bytes"] = reserved + outside
    memory["margin_bytes"] = room - reserved
    return fits


def _set_clock(
    result: dict[str, Any],
    few: Mapping[str, Any],
    more: Mapping[str, Any],
    times: float,
) -> None:
    """The clock is not affine: take what it costs out, and put that of the whole in."""
    powers = [
        Power(**{key: each["power"][key] for key in Power._fields})
        for each in (few, more, result)
    ]
    lost = _extend(powers[0].lost, powers[1].lost, times)
    for key in ("step_seconds", "compute_seconds"):
        result[key] += powers[2].lost - lost
    result["power"]["clock"] = powers[2].clock


def _extend(few: Any, more: Any, times: float, name: str = "") -> Any:
    if isinstance(more, Mapping) and name not in _KEPT:
        before = few if isinstance(few, Mapping) else {}
        return {
            key: _extend(before.get(key), each, times, key)
            for key, each in more.items()
        }
    is_number = isinstance(more, int | float) and not isinstance(more, bool)
    if not is_number or not isinstance(few, int | float) or name in _KEPT:
        return more
    value = few + (more - few) * times
    return round(value) if isinstance(more, int) else max(value, 0.0)
