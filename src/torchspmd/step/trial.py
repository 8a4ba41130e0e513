"""Two backends of a program take turns in real calls, and the faster one stays.

Both send the same, in the same order; their results differ by rounding. So that replicas
stay alike, all ranks run the same backend in the same call: programs that send the same
share one trial, and ranks count the calls of all of them. They make these together, also
where a rank runs another program for a batch of another size.

Turns change lap by lap. The first calls of a lap are not timed, since what the other
backend left is flushed there. The first lap is the graph's: where a rank needs another
program in it, as where batches have all sizes, the graph stays, and nothing more is
compiled.
"""

import contextlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, final

import torch

from torchspmd.step.lower.backends import BackendChoice
from torchspmd.step.measure.clock import Stopwatch
from torchspmd.step.program import Program
from torchspmd.step.programs import Programs
from torchspmd.step.progress import logger
from torchspmd.step.rank_agreement import READY_SECONDS, Agreement
from torchspmd.step.runtime import current_runtime

WARM_CALLS, TIMED_CALLS = 2, 4  # of a lap
LAP_CALLS = WARM_CALLS + TIMED_CALLS
ROUNDS = 3  # a lap of each backend: what drifts slows down both
TRIAL_CALLS = 2 * ROUNDS * LAP_CALLS

_BEGIN, _END = 0, 1  # marks
_MEASURED = f"the median of {ROUNDS * TIMED_CALLS} calls of each, on the slowest rank"
_NOT_ALONE = (
    "another program that sends the same was built within its first calls, as for a batch "
    "of another size"
)
_NOT_CALLED = (
    "a rank ran another program that sends the same whenever it was to be timed"
)


@final
class Trial:
    """The turns of two backends, for programs that send the same.

    Args:
        program: The program whose calls are timed; its rival is compiled by Inductor.
        ranks: The ranks that have built it together.
        on_stream: Whether it runs on a GPU.

    Attributes:
        programs: It, and those that were built since for batches of other sizes.
    """

    def __init__(self, program: Program, ranks: Agreement, on_stream: bool) -> None:
        self.programs = [program]
        self._ranks, self._on_stream = ranks, on_stream
        runtime = current_runtime()
        self._watches = [runtime.stopwatch(on_stream) for _ in ("graph", "inductor")]
        self._num_calls = 0
        self._has_begun = False  # whether Inductor has its turns

    @property
    def is_debut(self) -> bool:
        """Whether the next call is the first one of Inductor."""
        return self._num_calls == LAP_CALLS

    @property
    def _turn(self) -> int:
        return self._num_calls // LAP_CALLS % 2

    def counts(self, program: Program) -> bool:
        """Whether all ranks of this trial make the calls of a program together."""
        own = self.programs[0]
        sends_the_same = bool(own.plan.collectives) and program.plan == own.plan
        return program.number == own.number or sends_the_same

    def serving(self, program: Program) -> Program:
        """What makes the next call of a program."""
        return program.rival if self._turn and program.rival else program

    def begin_call(self, program: Program) -> Stopwatch | None:
        """Count a call; what to time it with, if it is to be timed."""
        place, watch = self._num_calls % LAP_CALLS, self._watches[self._turn]
        is_own = program is self.serving(self.programs[0])
        self._num_calls += 1
        if place == 0 and self._on_stream:
            torch.cuda.synchronize()  # nothing of the other backend is left to be run
        return watch if is_own and place >= WARM_CALLS else None

    def choose(self) -> BackendChoice | None:
        """What all ranks have come to before the next call; None to go on."""
        if self._num_calls >= TRIAL_CALLS:
            return self._choose_faster()
        if not self.is_debut or self._has_begun:
            return None
        if any(self._share(len(self.programs) > 1, "sizes")):
            return BackendChoice("graph", why=_NOT_ALONE)
        self._has_begun = True
        own = self.programs[0]
        assert own.choice is not None
        own.choice = replace(own.choice, needed=("graph", "inductor"))
        return None

    def _choose_faster(self) -> BackendChoice:
        own = [_median(watch) for watch in self._watches]
        told = self._share(own, "backend")
        if any(seconds is None for each in told for seconds in each):
            return BackendChoice("graph", why=_NOT_CALLED)
        graph, inductor = (max(each) for each in zip(*told, strict=True))
        taken = "inductor" if inductor < graph else "graph"
        seconds = {"graph": graph, "inductor": inductor}
        return BackendChoice(taken, (taken,), seconds, _MEASURED)

    def _share(self, value: object, stage: str) -> list[Any]:
        """A value of each rank that makes these calls."""
        if not self.programs[0].plan.collectives:
            return [value]
        texts = self._ranks.share(json.dumps(value), stage, READY_SECONDS)
        return [json.loads(text) for text in texts]


def _median(watch: Stopwatch) -> float | None:
    """The time of a call; None where none was timed to its end."""
    runs = [run for run in watch.read() if _END in run]
    return statistics.median(run[_END] - run[_BEGIN] for run in runs) if runs else None


@final
class Trials:
    """The trials of one step; in steady state there are none.

    Args:
        name: The step's name.
        programs: The programs of the step; the faster ones stay there.
    """

    def __init__(self, name: str, programs: Programs) -> None:
        self._name, self._programs = name, programs
        self._trials: list[Trial] = []

    def add(self, program: Program, ranks: Agreement, on_stream: bool) -> None:
        """A program was built: it takes part in the trial of those that send the same."""
        trial = self._of(program)
        if trial is not None:
            trial.programs.append(program)
        elif program.rival is not None:
            self._trials.append(Trial(program, ranks, on_stream))

    def serving(self, program: Program) -> Program:
        """What makes the next call of a program; a trial that is over ends here."""
        trial = self._of(program)
        if trial is None:
            return program
        choice = trial.choose()
        if choice is None:
            return trial.serving(program)
        self._trials.remove(trial)
        logger.info("%s, program %d: %s", self._name, program.number, choice)
        served = program
        for each in trial.programs:
            taken = each.rival if choice.taken == "inductor" and each.rival else each
            taken.choice, taken.rival, each.rival = choice, None, None
            self._programs.replace(each, taken)
            served = taken if each is program else served
        return served

    def is_debut(self, program: Program) -> bool:
        """Whether Inductor makes its first call, on all ranks."""
        trial = self._of(program)
        return trial is not None and trial.is_debut

    @contextlib.contextmanager
    def timing(self, program: Program) -> Iterator[None]:
        """Count the call that is made inside, and time it where that is asked for."""
        trial = self._of(program)
        watch = None if trial is None else trial.begin_call(program)
        if watch is not None:
            watch.begin_run()
            watch.mark(_BEGIN)
        yield
        if watch is not None:
            watch.mark(_END)

    def _of(self, program: Program) -> Trial | None:
        return next((each for each in self._trials if each.counts(program)), None)
