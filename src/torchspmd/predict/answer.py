"""What is told of a rehearsed rank: its memory and time, and those it waits for."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.curve_json import curve_json
from torchspmd.predict.hardware import Hardware
from torchspmd.predict.memory import Fits, MemoryAccount, count_memory
from torchspmd.predict.other_ranks import OtherRanks
from torchspmd.predict.prediction import TimePrediction, predict_time
from torchspmd.predict.stages import StagesDifferError
from torchspmd.predict.structure import mesh_json, modules_json
from torchspmd.predict.suggestions import Suggestion
from torchspmd.predict.text import size_text
from torchspmd.predict.time_suggestions import Gain
from torchspmd.rehearse.recording import Recording
from torchspmd.report.results import PREDICTION

__all__ = ["Answer", "answer"]


class Answer(NamedTuple):
    """A prediction.

    Attributes:
        account: Memory of the rank.
        timed: Its time.
        others: Memory of other ranks that were rehearsed to their end.
    """

    account: MemoryAccount
    timed: TimePrediction
    others: Sequence[MemoryAccount] = ()

    @property
    def worst(self) -> MemoryAccount:
        """Of the rank that needs the most memory: whether the script fits."""
        return min((self.account, *self.others), key=lambda each: each.margin)

    def of_another(self) -> str:
        """Which stage of the pipeline needs more than the one that is told of, or ""."""
        worst = self.worst
        if worst is self.account:
            return ""
        rank = worst.recording.rank
        words = {
            Fits.NO: "DOES NOT FIT",
            Fits.AT_RISK: "is AT RISK",
            Fits.YES: "fits",
        }
        return (
            f"Rank {rank}, another stage of the pipeline, needs the most memory: "
            f"{size_text(worst.device_peak)} of {size_text(worst.gpu.nbytes('total'))}, "
            f"and {words[worst.fits]}. --rank {rank} tells what holds it."
        )

    def as_json(
        self,
        ledger: Mapping[str, Any],
        *,
        brief: bool = False,
        timeline: bool = True,
        smaller: Sequence[Suggestion] = (),
        faster: Sequence[Gain] = (),
    ) -> dict[str, Any]:
        """The keys of docs/prediction_format.md, but those of who asked.

        Args:
            ledger: What the rank sends, as plain data.
            brief: Without what fills the file: the timeline and the curve of memory.
            timeline: Whether the timeline is in it.
            smaller: What would lower the peak.
            faster: What would make the step faster.
        """
        account, timed = self.account, self.timed
        recording = account.recording
        seconds = timed.as_json(timeline=timeline and not brief)
        figures = seconds.pop("assumptions")
        of_another = self.of_another()
        return {
            "format": PREDICTION,
            "version": 1,
            "world_size": recording.world_size,
            "rank": recording.rank,
            "gpus_per_node": recording.nodes.gpus_per_node,
            "nodes": list(recording.nodes.order),
            "gpu": account.gpu.name,
            "network": timed.figures.network and timed.figures.network.name,
            "steps": recording.steps,
            "fits": self.worst.fits.value,
            "memory": {
                **account.as_json(),
                "curve": None if brief else curve_json(account),
            },
            **seconds,
            "stages": self._stages(),
            "suggestions": [
                *(
                    {"what": g.text, "gain_seconds": g.seconds, "how": g.how}
                    for g in faster
                ),
                *(
                    {"what": each.text, "gain_bytes": each.saved_bytes, "of": each.of}
                    for each in smaller
                ),
            ],
            "modules": modules_json(account, timed),
            "mesh": mesh_json(recording),
            "ledger": dict(ledger),
            "assumptions": [
                {
                    "what": part.name,
                    "value": size_text(part.nbytes),
                    "source": part.source,
                }
                for part in account.fixed
            ]
            + figures,
            "notes": [
                *([of_another] if of_another else []),
                *recording.notes,
                *timed.notes(),
            ],
            "skipped": recording.skipped,
        }

    def _stages(self) -> dict[str, Any]:
        """What tells stages of a pipeline apart; memory of those that were rehearsed."""
        accounts = {each.recording.rank: each for each in (self.account, *self.others)}
        told: dict[str, Any] = {}
        for stage in self.timed.stages:
            account = accounts.get(stage.rank)
            told[str(stage.rank)] = {
                "compute_seconds": stage.compute_seconds,
                "model_flops": stage.flops,
                "fits": account and account.fits.value,
                "memory": account and {**account.as_json(), "holders": []},
            }
        return told


def answer(
    recording: Recording,
    others: OtherRanks | None,
    gpu: Hardware,
    network: Hardware,
    settings: AllocatorSettings,
) -> Answer:
    """Predict a rank.

    Args:
        recording: What it does.
        others: Who rehearses the ranks that it waits for; None: it waits for nobody.
        gpu: The device.
        network: Between nodes.
        settings: Of the allocator.
    """
    account = count_memory(recording, gpu, settings)
    if others is None:
        return Answer(account, predict_time(recording, gpu, network))
    timed, met = _time(recording, others, gpu, network)
    return Answer(account, timed, [count_memory(each, gpu, settings) for each in met])


def _time(
    recording: Recording, others: OtherRanks, gpu: Hardware, network: Hardware
) -> tuple[TimePrediction, list[Recording]]:
    """With the ranks that it waits for; and those: few of a long pipeline, if it can be."""
    some, ranks = others.few_stages(recording)
    if ranks:
        with contextlib.suppress(StagesDifferError):
            return predict_time(some, gpu, network, ranks=ranks), some[1:]
    every = others.stages(recording)
    return predict_time(every, gpu, network), every[1:]
