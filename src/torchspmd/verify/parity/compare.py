"""Compare a parallel recording with a reference, step by step."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from torchspmd.errors import RecordingError, UsageError
from torchspmd.layout.rounding import Tolerance, choose_tolerance
from torchspmd.verify.parity.causes import Cause, Evidence, find_cause
from torchspmd.verify.parity.compare_step import RESULTS, Sides, StepComparison
from torchspmd.verify.parity.origin import Result, Status, choose_first, place_of
from torchspmd.verify.parity.vacuous import (
    find_vacuous,
    rounding_notes,
    structure_problems,
)
from torchspmd.verify.parity.verdict import BITWISE, Difference, Verdict
from torchspmd.verify.recording.files import (
    INITIAL,
    Header,
    Key,
    Kind,
    Recording,
    load_recording,
)
from torchspmd.verify.recording.layouts import describe_layout

Asked = Tolerance | float | Literal["bitwise"] | None
_MAX_EXPLAINED = 40  # differences of one step whose cause is looked for


def compare_recordings(
    reference: str | os.PathLike[str],
    parallel: str | os.PathLike[str],
    *,
    tolerance: Asked = None,
    without_grad: Sequence[str] = (),
) -> Verdict:
    """Compare two recordings, the first of which is taken as right.

    Args:
        reference: A folder made by ``record``; most often of one device.
        parallel: Another one.
        tolerance: A number, relative to each tensor's size; ``"bitwise"``; or None to
            choose from dtype and depth.
        without_grad: Patterns of parameters that need not get a gradient.

    Returns:
        The verdict; ``bool(verdict)`` tells whether they agree.

    Raises:
        RecordingError: A recording is missing, not whole, or the two do not belong
            together.
    """
    left, right = load_recording(reference), load_recording(parallel)
    if left.first.num_steps != right.first.num_steps:
        raise RecordingError(
            f"{left.folder} has {left.first.num_steps} steps, {right.folder} has "
            f"{right.first.num_steps}. Record the same number of steps."
        )
    return _Comparison(left, right, tolerance, tuple(without_grad)).run()


class _Comparison:
    """Compares step by step, and keeps what later steps need to know."""

    def __init__(
        self,
        reference: Recording,
        parallel: Recording,
        tolerance: Asked,
        without_grad: tuple[str, ...],
    ) -> None:
        rounding = default_tolerance(reference)
        self.tolerance = _resolve(tolerance, rounding)
        size = max(rounding.relative, self.tolerance.relative)
        self.sides = Sides(reference, parallel, self.tolerance, size)
        self.without_grad = without_grad
        self.compared: Counter[str] = Counter()
        self.notes: dict[str, None] = {}
        self.unknown: Counter[str] = Counter()

    def run(self) -> Verdict:
        first: Difference | None = None
        differences: list[Difference] = []
        before: dict[Key, torch.Tensor] = {}
        for step in range(INITIAL, self.sides.reference.first.num_steps):
            comparison = StepComparison(self.sides, step)
            results = comparison.run()
            self._count(results)
            self.notes.update(dict.fromkeys(comparison.notes))
            if first is None:
                first, differences = self._judge(step, results, comparison, before)
            before = comparison.references
        return self._verdict(first, differences)

    def _count(self, results: Sequence[Result]) -> None:
        for result in results:
            if result.note == "missing" and result.status is Status.UNKNOWN:
                continue  # not seen by this kind of run; a note of its own says so
            if result.status is Status.UNKNOWN:
                self.unknown[result.key.kind.value] += 1
            else:
                self.compared[result.key.kind.value] += 1

    def _judge(
        self,
        step: int,
        results: Sequence[Result],
        comparison: StepComparison,
        before: dict[Key, torch.Tensor],
    ) -> tuple[Difference | None, list[Difference]]:
        if step == INITIAL and (problem := self._structure(results)):
            return problem[0], problem
        wrong = [result for result in results if result.status is Status.DIFFERS]
        if not any(result.key.kind in RESULTS for result in wrong):
            # After an update, parameters whose gradients are rounding differ, and what
            # they give, while no result depends on them.
            far = [each for each in wrong if each.relative > 30 * each.allowed]
            self.notes.update(
                (
                    f"{each.key.kind.value} {each.key.name!r} has another value than on "
                    "one device, but nothing follows from it",
                    None,
                )
                for each in far[:3]
            )
            return None, []
        chosen = choose_first(results, is_later=step > 0)
        assert chosen is not None, wrong
        beginning, place = chosen
        explained = {
            result.key: self._explain(step, result, comparison, before)
            for result in [beginning, *wrong[:_MAX_EXPLAINED]]
        }
        first = replace(explained.pop(beginning.key), place=place)
        rest = [each for each in explained.values() if each.kind in RESULTS]
        return first, [first, *rest]

    def _structure(self, results: Sequence[Result]) -> list[Difference]:
        there = {
            result.key.name: result.note != "missing"
            for result in results
            if result.key.kind is Kind.PARAMETER
        }
        sides = self.sides
        return [
            Difference(
                step=INITIAL,
                kind=Kind.PARAMETER,
                name=name,
                place=place_of(Key(Kind.PARAMETER, name)),
                relative=float("inf"),
                allowed=self.tolerance.relative,
                ranks=tuple(range(sides.parallel.first.world_size)),
                layout=sides.parallel.first.grid.describe(),
                cause=Cause("tie-cut" if "tie" in text else "missing", text),
            )
            for name, text in structure_problems(sides.reference, sides.parallel, there)
        ]

    def _explain(
        self,
        step: int,
        result: Result,
        comparison: StepComparison,
        before: dict[Key, torch.Tensor],
    ) -> Difference:
        header = self.sides.parallel.first
        match, layout = result.match, result.note
        ranks = tuple(range(header.world_size))
        cause = _cause_without_match(result)
        if match is not None:
            ranks = match.wrong_ranks
            layout = describe_layout(header.grid, match.layout)
            evidence = Evidence(
                match.layout,
                match.found,
                match.expected,
                match.excess,
                match.error,
                kind=result.key.kind,
                reference=comparison.references[result.key],
                grid=header.grid,
                data_axes=header.data_axes,
                closeness=max(8 * result.allowed, 1e-9),
                before=before.get(result.key),
            )
            cause = find_cause(evidence)
        return Difference(
            step=step,
            kind=result.key.kind,
            name=result.key.name,
            place=place_of(result.key),
            relative=result.relative,
            allowed=result.allowed,
            ranks=ranks,
            layout=layout,
            cause=cause,
        )

    def _verdict(
        self, first: Difference | None, differences: list[Difference]
    ) -> Verdict:
        reference, parallel = self.sides.reference.first, self.sides.parallel.first
        vacuous = find_vacuous(self.sides.watch, reference, parallel, self.without_grad)
        for kind, count in self.unknown.items():
            self.notes[
                f"{count} of kind {kind!r} could not be compared: no layout of the mesh "
                "gives the shapes that the ranks hold"
            ] = None
        notes = [*self.notes, *parallel.notes, *rounding_notes(self.sides.watch)]
        notes += _blind_spots(parallel)
        return Verdict(
            ok=first is None and not vacuous,
            first=first,
            differences=tuple(differences),
            vacuous=tuple(vacuous),
            compared=dict(self.compared),
            num_steps=reference.num_steps,
            world=parallel.grid.describe(),
            tolerance=self.tolerance,
            notes=tuple(notes),
        )


def _blind_spots(header: Header) -> list[str]:
    found = []
    if not header.sees_modules:
        found.append(
            "activations and their gradients are not seen in a compiled step; the place "
            "is that of the first parameter that differs"
        )
    if not header.sees_gradients:
        found.append(
            "gradients are not seen: the step clears them before it returns; they are "
            "compared through the updates"
        )
    return found


def _cause_without_match(result: Result) -> Cause:
    if result.note == "extra":
        return Cause(
            "extra",
            "only the parallel run has it: another optimizer there, or another option of "
            "it, such as amsgrad",
        )
    if result.note != "missing":
        return Cause("shape", result.note)
    what = "it was never computed, is frozen there, or is cut off from autograd"
    return Cause("missing", f"the parallel run has no such value: {what}")


def default_tolerance(reference: Recording) -> Tolerance:
    """From the least exact dtype of the model, and the number of module calls."""
    pieces = reference.read_step(INITIAL)[0]
    dtypes = {getattr(torch, piece.dtype) for piece in pieces.values()}
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    coarsest = max(floating, key=lambda d: torch.finfo(d).eps, default=torch.float32)
    return choose_tolerance(coarsest, reference.first.depth)


def _resolve(asked: Asked, default: Tolerance) -> Tolerance:
    if isinstance(asked, Tolerance):
        return asked
    if asked == "bitwise":
        return BITWISE
    if asked is None:
        return default
    if isinstance(asked, (int, float)) and 0 <= asked < 1:
        return Tolerance(float(asked), "as given")
    raise UsageError(
        f"tolerance={asked!r}: give a number from 0 to 1, relative to the size of each "
        "tensor, or 'bitwise', or leave it out."
    )
