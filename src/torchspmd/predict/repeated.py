"""Repeated blocks are rehearsed twice, not all of them: the difference is extended.

What a block takes and holds is the same for each of them, so that the figures of a model
are affine in their number: from two rehearsals with few blocks follow those with many.
"""

from collections.abc import Mapping
from typing import Any

from torchspmd.predict.memory import verdict
from torchspmd.predict.power import Power

__all__ = ["extend"]

_KEPT = frozenset(
    {"mfu", "step_error", "fragmentation", "device_bytes", "idle", "limit", "behind"}
)


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
    if result.get("power") and result.get("step_seconds"):
        _set_clock(result, few, more, times)
    seconds, flops = result.get("step_seconds"), result.get("model_flops")
    if seconds and flops and more.get("mfu") and more.get("step_seconds"):
        peak = more["model_flops"] / more["step_seconds"] / more["mfu"]
        result["mfu"] = flops / seconds / peak
    memory = result.get("memory")
    if memory and memory.get("device_bytes"):
        memory["margin_bytes"] = memory["device_bytes"] - memory["device_peak_bytes"]
        fits = verdict(memory["margin_bytes"], memory["reserved_peak_bytes"])
        result["fits"] = fits.value
    return result


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
    if isinstance(more, Mapping):
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
