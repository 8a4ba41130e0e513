"""A predicted step as text: the worst thing first."""

from collections.abc import Iterator, Sequence

from torchspmd.comm import of_axis
from torchspmd.predict.account import Part
from torchspmd.predict.prediction import TimePrediction
from torchspmd.predict.text import size_text
from torchspmd.predict.time_suggestions import Gain
from torchspmd.rehearse.recording import Synchronize
from torchspmd.report.views.prediction import exposed_by_layers

__all__ = ["describe_time", "seconds_text"]

_UNEVEN = 1.1  # of the mean: less is in the nature of first and last stages
_NAMES = {
    Part.COMPUTE: "the device computes",
    Part.EXPOSED: "computation waits for communication",
    Part.HOST: "the device waits for the host",
    Part.BUBBLE: "this stage waits for another",
}


def seconds_text(seconds: float) -> str:
    """Seconds in the unit that people say them in.

    >>> seconds_text(2.5), seconds_text(0.0125), seconds_text(3e-6)
    ('2.50 s', '12.50 ms', '3.0 us')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} us"


def describe_time(
    prediction: TimePrediction, gains: Sequence[Gain] = (), *, most: int = 6
) -> str:
    """The prediction in lines of plain text.

    Args:
        prediction: Of ``predict_time``.
        gains: Of ``suggest_faster``.
        most: Exposed communications that are listed.
    """
    if prediction.account is None:
        who = (
            "another rank of the pipeline"
            if prediction.recording.steps
            else "the script"
        )
        return f"No step time: {who} made no optimizer step."
    return "\n".join(
        [
            *_verdict(prediction),
            *_parts(prediction),
            *_exposed(prediction, most),
            *_gains(gains),
        ]
    )


def _verdict(prediction: TimePrediction) -> Iterator[str]:
    account = prediction.account
    assert account is not None
    error = prediction.error
    yield (
        f"A steady step takes {seconds_text(account.seconds)} on "
        f"{prediction.figures.gpu.title}, give or take {error.error:.0%} ({error.source})."
    )
    flops, mfu = prediction.model_flops, prediction.mfu
    num = len(prediction.stages)
    whose = f"a rank, the mean of {num} stages" if num else "this rank"
    if flops and mfu is not None:
        dtype, peak = prediction.peak_rate
        amount = f"{flops / 1e12:.2f} T" if flops >= 1e11 else f"{flops / 1e9:.2f} G"
        yield (
            f"{amount}FLOP of the model on {whose}: {mfu:.1%} of the peak "
            f"of {dtype} ({peak / 1e12:.0f} TFLOP/s)."
        )
    yield from _uneven(prediction)
    if prediction.evaluation > 0:
        rest = account.seconds - prediction.evaluation
        yield (
            f"{seconds_text(prediction.evaluation)} of it are passes of the trained model "
            f"in eval mode without gradients (evaluation, generation): a step without them "
            f"takes {seconds_text(rest)}."
        )
    issue = prediction.host_issue_seconds
    waits = any(isinstance(e.event, Synchronize) for e in prediction.program.items)
    if prediction.is_host_bound and waits and issue < account.parts[Part.COMPUTE]:
        yield (
            "HOST-BOUND: the host waits for the device within a step, as to read a value "
            "(.item()) or to copy one (.to(device)), and then the device for the host. "
            "Wait less often; larger batches help too, a faster GPU does not."
        )
    elif prediction.is_host_bound:
        yield (
            f"HOST-BOUND: issuing a step takes the host "
            f"{seconds_text(issue)}, and the device waits for it. "
            "Larger batches, torch.compile or CUDA graphs help; a faster GPU does not."
        )


def _uneven(prediction: TimePrediction) -> Iterator[str]:
    """All stages take as long as the slowest one."""
    if not prediction.stages:
        return
    seconds = [stage.compute_seconds for stage in prediction.stages]
    slowest = max(prediction.stages, key=lambda stage: stage.compute_seconds)
    mean = sum(seconds) / len(seconds)
    if slowest.compute_seconds > _UNEVEN * mean:
        yield (
            f"The stages are uneven: rank {slowest.rank} computes for "
            f"{seconds_text(slowest.compute_seconds)}, the others have to wait for it; the "
            f"mean is {seconds_text(mean)}, the least {seconds_text(min(seconds))}."
        )


def _parts(prediction: TimePrediction) -> Iterator[str]:
    account = prediction.account
    assert account is not None
    for part, seconds in sorted(account.parts.items(), key=lambda pair: -pair[1]):
        if seconds > 0:
            share = seconds / account.seconds
            yield f"  {seconds_text(seconds):>10} {share:6.1%}  {_NAMES[part]}"
    busy = "collectives are in flight, overlapped or exposed"
    for seconds, what in (
        (account.optimizer, "of the step are the optimizer's"),
        (account.communication, busy),
    ):
        if seconds:
            share = seconds / account.seconds
            yield f"  {seconds_text(seconds):>10} {share:6.1%}  {what}"


def _exposed(prediction: TimePrediction, most: int) -> Iterator[str]:
    account = prediction.account
    assert account is not None
    if account.exposed:
        yield "Communication that computation waits for:"
    for entry in exposed_by_layers([each.as_json() for each in account.exposed])[:most]:
        size = size_text(entry["bytes"] / entry["count"])
        yield (
            f"  {seconds_text(entry['seconds']):>10}  {entry['kind']} "
            f"{of_axis(entry['axis'])} in {entry['module'] or 'no module'}, "
            f"{entry['count']} x {size}: {entry['cause']}"
        )


def _gains(gains: Sequence[Gain]) -> Iterator[str]:
    if gains:
        yield "What would make it faster (each by itself):"
    for gain in gains:
        yield f"  {seconds_text(gain.seconds):>10}  {gain.text} ({gain.how})"
