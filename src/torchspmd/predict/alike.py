"""Whether the step that is told is like the rehearsed ones before it."""

from torchspmd.predict.traffic import op_flops
from torchspmd.rehearse.recording import Mark, MarkKind, Op, Recording

__all__ = ["unlike_note"]

_ALIKE = 0.05  # the most by which the products of two steps may differ
_CAPTURES = frozenset({MarkKind.CAPTURE_BEGIN, MarkKind.REPLAY_BEGIN})


def unlike_note(recording: Recording) -> str:
    """What to know of steps that differ; empty where they are alike.

    As in reinforcement learning, where several steps follow one rollout: any one of them
    is not what the script does all the time.
    """
    flops = _flops_of_steps(recording)
    if len(flops) < 2 or max(flops) - min(flops) <= _ALIKE * max(flops):
        return ""
    *before, last = (f"{each / 1e12:.3g}" for each in flops[-6:])
    return (
        f"The steps that were rehearsed differ: products of {', '.join(before)} TFLOP "
        f"before the step that is told, which has {last}. Where steps go on like this, as "
        "when several follow one rollout, or some have longer rows, tell the others too "
        "(--skip), and take the mean."
    )


def _flops_of_steps(recording: Recording) -> list[float]:
    """Of each step; what went before the first round of all optimizers is one."""
    flops, total, steps = [], 0.0, 0
    for event in recording.events:
        if isinstance(event, Op):
            total += op_flops(event)
        elif isinstance(event, Mark) and event.kind in _CAPTURES:
            return []  # work is recorded where it is captured, and does not run there
        elif isinstance(event, Mark) and event.kind is MarkKind.STEP_END:
            steps += 1
            if steps > recording.parts:
                flops.append(total)
                total = 0.0
    return flops
