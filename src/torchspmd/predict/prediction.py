"""The predicted time of a steady step, with everything that it is made of."""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torchspmd.predict.account import Part, StepAccount, account_for
from torchspmd.predict.alike import unlike_note
from torchspmd.predict.collectives import Link
from torchspmd.predict.evaluation import without_evaluation
from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import Hardware
from torchspmd.predict.operators import Pricer, is_known
from torchspmd.predict.power import Power, at_clock, power_of
from torchspmd.predict.products import rate_name
from torchspmd.predict.program import Program, price_step
from torchspmd.predict.slices import timeline_json
from torchspmd.predict.stages import fill_in
from torchspmd.predict.timeline import Item, Kind, Run, simulate
from torchspmd.predict.traffic import base_name
from torchspmd.rehearse.recording import Comm, Event, Op, Phase, Recording

__all__ = ["ErrorBar", "Stage", "TimePrediction", "predict_time"]

_MODEL = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OTHER})
NEAR_HOST = 0.75  # of a step, that the host needs to issue it
ROUNDS = 3
# Items of all ranks, above which a simulation takes seconds: what would make the step
# faster is then not simulated ten times more.
_LONG = 400_000


class ErrorBar(NamedTuple):
    """The error to expect, as a fraction, and the table it comes from."""

    error: float
    source: str


class Stage(NamedTuple):
    """A rank of a pipeline: seconds that it computes in a step, and its model FLOPs."""

    rank: int
    compute_seconds: float
    flops: float


@dataclass(frozen=True, slots=True)
class TimePrediction:
    """The time of one rank's steady step.

    Attributes:
        recording: What was priced.
        figures: Of the hardware, with those that were used.
        pricer: That priced operators.
        program: The steady step.
        run: Of the simulation; None where the script made no step.
        account: What the step is made of.
        rank: The place of this rank among those that were simulated.
        power: That the step draws, and the clock that is left.
        error: To expect of the step.
        evaluation: Seconds of the step that it would not take without passes of the
            trained model in eval mode.
        stages: Of the pipeline that this rank is on, in order; () where it is on none.
        recorded: The steps of all ranks that were recorded, this one's among them.
        ranks: Of all stages of the pipeline, where only some were recorded.
    """

    recording: Recording
    figures: Figures
    pricer: Pricer
    program: Program
    run: Run | None
    account: StepAccount | None
    rank: int
    power: Power
    error: ErrorBar
    evaluation: float = 0.0
    stages: tuple[Stage, ...] = ()
    recorded: tuple[Program, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def is_long(self) -> bool:
        """Whether the steps of a pipeline take long to simulate."""
        recorded = len(self.recorded)
        items = sum(len(program.items) for program in self.recorded)
        return recorded > 1 and items * len(self.stages) > _LONG * recorded

    def all_stages(self, recorded: Sequence[Program]) -> list[Program]:
        """With those that follow from the recorded ones, in order of the simulation.

        Raises:
            StagesDifferError: They do not follow.
        """
        if not self.ranks:
            return list(recorded)
        known = {each.recording.rank: each for each in recorded}
        return fill_in(known, self.ranks, self.figures)

    @property
    def step_seconds(self) -> float | None:
        """Of one steady step; None where the script made none."""
        return None if self.account is None else self.account.seconds

    @property
    def host_issue_seconds(self) -> float:
        """That the host needs to issue a step."""
        return 0.0 if self.run is None else self.run.host[self.rank]

    def flops(self, *, recomputed: bool = False) -> float:
        """Of this rank and step; model FLOPs are without those that are done again."""
        total = 0.0
        for place, cost in self.program.costs.items():
            if recomputed or counts_for_model(self.recording.events[place]):
                total += cost.flops
        return total

    @property
    def peak_rate(self) -> tuple[str, float]:
        """The element type that does most operations, and the GPU's peak for it."""
        by_rate: dict[str, float] = {}
        for place, cost in self.program.costs.items():
            event = self.recording.events[place]
            if isinstance(event, Op) and cost.flops and event.inputs:
                name = rate_name(event)
                by_rate[name] = by_rate.get(name, 0.0) + cost.flops
        name = max(by_rate, key=lambda name: by_rate[name], default="bfloat16")
        return name, self.figures.number(f"flops.{name}", "flops.bfloat16")

    @property
    def model_flops(self) -> float:
        """Of this rank and step; of a pipeline, whose stages differ, the mean."""
        if not self.stages:
            return self.flops()
        return sum(stage.flops for stage in self.stages) / len(self.stages)

    @property
    def mfu(self) -> float | None:
        """Part of the GPU's peak rate that model FLOPs reach."""
        if not self.step_seconds:
            return None
        return self.model_flops / self.step_seconds / self.peak_rate[1]

    @property
    def is_host_bound(self) -> bool:
        """Whether the device waits for the host during a tenth of the step or more."""
        account = self.account
        return account is not None and (
            account.parts[Part.HOST] >= 0.1 * account.seconds
        )

    @property
    def crosses_nodes(self) -> bool:
        """Whether a group of the step is on several nodes."""
        return any(item.link is Link.NETWORK for item in self.program.items)

    @property
    def sends(self) -> bool:
        """Whether ranks, if there are several, tell each other more than to wait."""
        sent = (item.event for item in self.program.items)
        return self.recording.world_size == 1 or any(
            isinstance(event, Comm) and event.kind != "barrier" and len(event.ranks) > 1
            for event in sent
        )

    def notes(self) -> list[str]:
        """What was assumed for this prediction, and what was not known."""
        notes = list(self.program.notes)
        if unlike := unlike_note(self.recording):
            notes.append(unlike)
        if self.account is not None and not self.sends:
            notes.append(
                f"The {self.recording.world_size} ranks send each other nothing in the "
                "step: each trains a model of its own. If they should train one, wrap it, "
                "as in DistributedDataParallel or fully_shard."
            )
        unknown = Counter(
            event.name
            for place in self.program.costs
            if isinstance(event := self.recording.events[place], Op)
            and not event.views
            and not is_known(event.name)
        )
        foreign = {name for name in unknown if not base_name(name)}
        for names, kind in (
            (
                sorted(unknown.keys() - foreign),
                "Operators that are priced by their bytes alone",
            ),
            (
                sorted(foreign),
                "Operators on sparse tensors, or of other libraries, are priced by their "
                "bytes alone, and the FLOPs of the model are without theirs",
            ),
        ):
            if names:
                counts = ", ".join(f"{name} ({unknown[name]})" for name in names)
                notes.append(f"{kind}: {counts}.")
        if self.is_long:
            notes.append(
                "Of what would make it faster, only changes to the pipeline were tried: "
                f"the steps of its {len(self.stages)} stages have "
                f"more than {_LONG:,} operators and waits."
            )
        power = self.power
        if power.clock < 1:
            others = (
                f"; the slowest of the ranks, for whom the others wait, at "
                f"{power.slowest:.0%}"
                if power.behind
                else ""
            )
            notes.append(
                f"Products run at {power.clock:.0%} of the rate of a short run, because "
                f"the chip has {power.limit:.0f} W{others}."
            )
        if self.account is not None and not power.limit:
            notes.append(
                "The GPU's file has no power limit and sustained rate (power.limit, "
                "flops.bfloat16_sustained): products keep the rate of a short run, which "
                "is too fast where they fill most of a step."
            )
        if self.account is not None:
            notes += self.figures.notes()
            dtype, _ = self.peak_rate
            notes.append(
                f"MFU is of the peak rate of {dtype}; causal attention counts half, and "
                "its backward two and a half times its forward; "
                "congestion of the network, ranks that are slow for other reasons than "
                "their chip's power, and data loading are not in the prediction."
            )
        return notes

    def module_flops(self) -> dict[str, float]:
        """Of forward, backward and recomputation, by module."""
        flops: dict[str, float] = {}
        for place, cost in self.program.costs.items():
            event = self.recording.events[place]
            if isinstance(event, Op) and cost.flops:
                module = event.site.module
                flops[module] = flops.get(module, 0.0) + cost.flops
        return flops

    def as_json(self, *, timeline: bool = True) -> dict[str, Any]:
        """The keys of docs/prediction_format.md that are about time."""
        account = self.account
        parts: Mapping[Part, float | None] = dict.fromkeys(Part)
        if account is not None:
            parts = account.parts
        return {
            "step_seconds": self.step_seconds,
            "compute_seconds": parts[Part.COMPUTE],
            "communication_seconds": account and account.communication,
            "exposed_seconds": parts[Part.EXPOSED],
            "host_seconds": parts[Part.HOST],
            "host_issue_seconds": self.host_issue_seconds if account else None,
            "bubble_seconds": parts[Part.BUBBLE],
            "optimizer_seconds": account and account.optimizer,
            "evaluation_seconds": self.evaluation if account else None,
            "step_error": self.error.error,
            "step_error_source": self.error.source,
            "power": {**self.power._asdict(), "clock": self.power.clock},
            "model_flops": self.model_flops,
            "mfu": self.mfu,
            "exposed": [
                each.as_json() for each in (account.exposed if account else ())
            ],
            "timeline": (
                timeline_json(self.run, self.rank, account, self.program)
                if timeline and account is not None and self.run is not None
                else None
            ),
            "assumptions": self.figures.assumptions(),
        }


def counts_for_model(event: Event) -> bool:
    """Whether the FLOPs of an operator are the model's, not done a second time."""
    return isinstance(event, Op) and event.site.phase in _MODEL


def predict_time(
    recordings: Recording | Sequence[Recording],
    gpu: Hardware,
    network: Hardware | None = None,
    *,
    of: int = 0,
    ranks: Sequence[int] = (),
) -> TimePrediction:
    """Predict a steady step of a recorded rank.

    Args:
        recordings: Of one rank; or of several that meet in sends and receives, such as
            one of each stage of a pipeline.
        gpu: The device, with its figures.
        network: Between nodes; needed where a group is on several.
        of: Which of the recordings the answer is about.
        ranks: Of all stages of the pipeline, in order, where only some are recorded; the
            others follow from them (``stages.py``).

    Raises:
        StagesDifferError: Stages without a recording do not follow from the others.
        UsageError: A group is on several nodes and no network was named, the hardware
            file lacks a figure, or the recordings wait for each other for ever.
    """
    several = [recordings] if isinstance(recordings, Recording) else list(recordings)
    figures = Figures(gpu, network)
    pricer = Pricer(figures)
    recorded = programs = [price_step(recording, pricer) for recording in several]
    program = programs[of]
    if ranks:
        known = {each.recording.rank: each for each in recorded}
        programs = fill_in(known, ranks, figures)
    place = next(i for i, each in enumerate(programs) if each is program)
    run = account = None
    power, evaluation = Power(), 0.0
    if all(each.items for each in programs):
        run, powers = simulate_programs(programs, figures, of=place)
        account, power = account_for(run, place), powers[place]
        if len(programs) == 1 and (rest := without_evaluation(program)) is not None:
            shorter, _ = simulate_programs([rest], figures)
            evaluation = account.seconds - account_for(shorter).seconds
    return TimePrediction(
        recording=several[of],
        figures=figures,
        pricer=pricer,
        program=program,
        run=run,
        account=account,
        rank=place,
        power=power,
        error=error_bar(
            gpu,
            multi_rank=several[of].world_size > 1,
            near_host=account is not None
            and run is not None
            and run.host[place] > NEAR_HOST * account.seconds,
        ),
        evaluation=evaluation,
        stages=_stages(programs, place, account) if len(programs) > 1 else (),
        recorded=tuple(recorded),
        ranks=tuple(ranks),
    )


def _stages(
    programs: Sequence[Program], place: int, account: StepAccount | None
) -> tuple[Stage, ...]:
    """All of a pipeline; kernels are as much slower in the step as those of one stage."""
    stages = [_stage(program) for program in programs]
    alone = stages[place].compute_seconds
    slower = (
        account.parts[Part.COMPUTE] / alone if account is not None and alone else 1.0
    )
    return tuple(
        each._replace(compute_seconds=each.compute_seconds * slower) for each in stages
    )


def _stage(program: Program) -> Stage:
    """One whose operators may be those of another rank's recording."""
    seconds = flops = 0.0
    for item in program.items:
        if item.kind is Kind.COMPUTE:
            seconds += item.work
        if item.event is not None and counts_for_model(item.event):
            flops += (
                program.costs[item.place].flops if item.place in program.costs else 0
            )
    return Stage(program.recording.rank, seconds, flops)


def simulate_programs(
    programs: Sequence[Program],
    figures: Figures,
    *,
    rounds: int = ROUNDS,
    of: int | None = None,
) -> tuple[Run, list[Power]]:
    """Run them on one clock; and again, where that takes more power than the chip has."""
    items = [program.items for program in programs]
    run = _simulate(items, programs, figures, rounds, of)
    powers = []
    for program, ends in zip(programs, run.ends, strict=True):
        seconds = ends[-1] - (ends[-2] if rounds > 1 else 0.0)
        ranks = program.recording.world_size
        powers.append(power_of(figures, program.costs.values(), seconds, ranks))
    clocks = [power.slowest for power in powers]
    if min(clocks) == 1:
        return run, powers
    slowed = [
        [at_clock(item, program.costs.get(item.place), clock) for item in program.items]
        for program, clock in zip(programs, clocks, strict=True)
    ]
    return _simulate(slowed, programs, figures, rounds, of), powers


def _simulate(
    items: Sequence[Sequence[Item]],
    programs: Sequence[Program],
    figures: Figures,
    rounds: int,
    of: int | None,
) -> Run:
    return simulate(
        items,
        rounds=rounds,
        of=of,
        slowdown=figures.number("overlap.slowdown"),
        ranks=[program.recording.rank for program in programs],
    )


@lru_cache(maxsize=1)
def _validation() -> dict[str, Any]:
    path = Path(__file__).with_name("validation.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def error_bar(
    gpu: Hardware, *, multi_rank: bool = False, near_host: bool = False
) -> ErrorBar:
    """The error of nine of ten rows of the validation table that is nearest.

    Args:
        gpu: The device.
        multi_rank: Whether ranks communicate.
        near_host: Whether the host needs about as long as the device: then the step takes
            what this host and the script's Python take, which no file knows.
    """
    tables = _validation()
    names = ["several_ranks"] if multi_rank else [f"one_rank_{gpu.name}", "one_rank"]
    if near_host:
        names = ["near_host"]
    table = next(tables[name] for name in names if name in tables)
    return ErrorBar(float(table["error"]), str(table["source"]))
