"""The likely cause of a difference, from its pattern.

Each pattern is a function that looks at the evidence and answers with a cause or with
None; the first that answers is taken. The order is from the most to the least specific.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchspmd.verify.parity.match import Match, difference, largest, sums_along
from torchspmd.verify.recording.files import Kind
from torchspmd.verify.recording.layouts import Grid, cut

# ----------------------------------------------------------------------------
# What is known of a difference, and the questions that patterns ask of it.

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Cause:
    """A short name for programs, and a sentence for people."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Evidence(Match):
    """A difference between what ranks hold and what one device has."""

    kind: Kind
    reference: torch.Tensor
    grid: Grid
    data_axes: tuple[str, ...]
    closeness: float  # relative difference up to which a pattern fits
    before: torch.Tensor | None = None  # the reference one step earlier

    def cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's part of another whole value."""
        return [cut(whole, self.grid, self.layout, rank) for rank in self.grid.ranks]

    def close(self, value: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether two tensors are the same for the purpose of a pattern."""
        return _is_close(value, expected, self.closeness)

    def wrong_elements(
        self, value: torch.Tensor, expected: torch.Tensor
    ) -> torch.Tensor:
        """Which elements differ by more than a pattern tolerates."""
        size = largest(expected)
        return difference(value, expected) > self.closeness * size

    def all_close(self, others: Tensors, *, but_for_offset: bool = False) -> bool:
        """Whether these are, rank by rank, what was expected."""
        if not but_for_offset:
            return all(map(self.close, others, self.expected))
        if not _has_rows(self.expected):
            return False
        pairs = zip(others, self.expected, strict=True)
        return all(self.close(centred(a), centred(b)) for a, b in pairs)

    def ranks_agree(self) -> bool:
        """Whether ranks that should hold the same part hold the same values."""
        pairs = zip(self.grid.names, self.layout, strict=True)
        axes = [name for name, text in pairs if text == "R"]
        return all(
            self.close(self.found[other], self.found[rank])
            for rank in range(len(self.found))
            for other in self.grid.along(rank, axes)
        )

    def factors(
        self,
        *,
        minus: Tensors | None = None,
        but_for_offset: bool = False,
        closeness: float | None = None,
    ) -> list[float] | None:
        """For each rank the number by which its value is too large, where there is one.

        Args:
            minus: Taken from both sides first.
            but_for_offset: Leave out what is the same in all rows.
            closeness: How well the factor must fit; that of the evidence.
        """
        if but_for_offset and not _has_rows(self.expected):
            return None
        factors = []
        for rank, (value, expected) in enumerate(
            zip(self.found, self.expected, strict=True)
        ):
            left, right = value.double(), expected.double()
            if minus is not None:
                left, right = left - minus[rank], right - minus[rank]
            if but_for_offset:
                left, right = centred(left), centred(right)
            power = float((right * right).sum())
            if not power:
                if bool(left.any()):
                    return None
                continue
            factor = float((left * right).sum()) / power
            limit = self.closeness if closeness is None else closeness
            if not factor or not _is_close(left, right * factor, limit):
                return None
            # Tensors that are nearly equal fit a factor of 1: it must explain something.
            gap = largest(left - right)
            if not but_for_offset and largest(left - right * factor) > 0.1 * gap:
                return None
            factors.append(factor)
        return factors or None


def centred(value: torch.Tensor) -> torch.Tensor:
    """A tensor without what is the same in all of its rows, such as a bias."""
    return value.double() - value.double().flatten(0, -2).mean(0)


def _has_rows(values: Tensors) -> bool:
    return all(
        value.ndim > 1 and value.numel() >= 3 * value.shape[-1] > 0 for value in values
    )


def _is_close(value: torch.Tensor, expected: torch.Tensor, closeness: float) -> bool:
    if value.shape != expected.shape:
        return False
    gap = difference(value, expected)
    size = largest(expected)
    return not gap.numel() or float(gap.max()) <= closeness * size


def axis_sets(grid: Grid) -> list[tuple[str, ...]]:
    """Each axis that has more than one rank, then all of them together."""
    names = [n for n, size in zip(grid.names, grid.shape, strict=True) if size > 1]
    return [(name,) for name in names] + ([tuple(names)] if len(names) > 1 else [])


Pattern = Callable[[Evidence], Cause | None]


def find_cause(evidence: Evidence) -> Cause:
    """The cause that fits the pattern of a difference best."""
    if not evidence.reference.numel():
        return Cause("unknown", "the value is empty on one device")
    for pattern in _PATTERNS:
        cause = pattern(evidence)
        if cause is not None:
            return cause
    return Cause("unknown", "no known pattern; the ranks agree with each other")


# --- values that are not there --------------------------------------------------------


def _not_finite(evidence: Evidence) -> Cause | None:
    if all(bool(value.isfinite().all()) for value in evidence.found):
        return None
    return Cause("not-finite", "the parallel run has values that are not finite")


def _zero(evidence: Evidence) -> Cause | None:
    if any(bool(value.any()) or not value.numel() for value in evidence.found):
        return None
    return Cause(
        "zero", "all zeros in the parallel run: it was never computed, or lost"
    )


def _stale(evidence: Evidence) -> Cause | None:
    if evidence.before is None:
        return None
    old = evidence.cut(evidence.before)
    if any(
        value.shape != part.shape
        for value, part in zip(evidence.found, old, strict=True)
    ):
        return None
    gaps = [
        float(difference(*pair).max()) for pair in zip(evidence.found, old, strict=True)
    ]
    if max(gaps) > 0.02 * evidence.error:
        return None
    what = (
        "it was not updated in this step: the update is lost"
        if evidence.kind in (Kind.PARAMETER, Kind.STATE, Kind.BUFFER)
        else "it is computed from stale weights"
    )
    return Cause("stale", f"equal to the value one step earlier: {what}")


def _accumulated(evidence: Evidence) -> Cause | None:
    if evidence.kind is not Kind.GRADIENT or evidence.before is None:
        return None
    old = evidence.cut(evidence.before)
    pairs = zip(evidence.expected, old, strict=True)
    if not all(
        map(evidence.close, evidence.found, [new + past for new, past in pairs])
    ):
        return None
    return Cause(
        "accumulated",
        "equal to this step's gradient and the last one's together: gradients were not "
        "cleared in between",
    )


# --- reductions -----------------------------------------------------------------------


def _missing_reduction(evidence: Evidence) -> Cause | None:
    if evidence.ranks_agree():
        return None
    for axes in axis_sets(evidence.grid):
        sums = sums_along(evidence.found, evidence.grid, axes)
        if sums is None:
            continue
        name, size = " and ".join(map(repr, axes)), evidence.grid.size(axes)
        if evidence.all_close(sums) or evidence.all_close(sums, but_for_offset=True):
            return Cause(
                "missing-reduction",
                f"each rank holds a partial value, and their sum over {name} is right: a "
                f"reduction (sum) over {name} is missing",
            )
        if evidence.all_close([total / size for total in sums]):
            return Cause(
                "missing-average",
                f"each rank holds its own value, and their average over {name} is right: "
                f"a reduction (average) over {name} is missing",
            )
    return None


def _constant_factor(evidence: Evidence) -> Cause | None:
    factors = evidence.factors()
    if factors is None or (evidence.reference.numel() == 1 and len(set(factors)) == 1):
        return _factor_of_one_number(factors, evidence)
    if max(factors) - min(factors) > 10 * evidence.closeness * abs(max(factors)):
        return Cause(
            "factor-by-rank",
            "right but for a factor that differs by rank: each rank scaled by its own "
            "number (a local norm, count or length) instead of the whole one's",
        )
    return explain_factor(factors[0], evidence.grid, evidence.closeness)


def _factor_of_one_number(
    factors: list[float] | None, evidence: Evidence
) -> Cause | None:
    """One number always fits a factor: only a telling one counts."""
    if factors is None:
        return None
    cause = explain_factor(factors[0], evidence.grid, evidence.closeness)
    return None if cause.code == "factor" and abs(factors[0] - 1) < 0.1 else cause


def _factor_of_update(evidence: Evidence) -> Cause | None:
    """A parameter moved in the right direction, but not as far."""
    if evidence.kind is not Kind.PARAMETER or evidence.before is None:
        return None
    old = evidence.cut(evidence.before)
    factors = evidence.factors(minus=old, closeness=0.05)
    if factors is None or max(factors) - min(factors) > 0.05 * abs(max(factors)):
        return None
    return Cause(
        "update-factor",
        f"the update has the right direction but is {factors[0]:.3g} times as large: "
        "another learning rate, or gradients of another scale",
    )


def _factor_beside_offset(evidence: Evidence) -> Cause | None:
    """A factor on all but a bias, which was added afterwards."""
    factors = evidence.factors(but_for_offset=True)
    if factors is None:
        return None
    factor = factors[0]
    if abs(factor - 1) <= 10 * evidence.closeness:
        return Cause(
            "offset",
            "off by the same amount in every row: a bias that is added more than once, "
            "by every rank before a sum, or not at all",
        )
    return explain_factor(factor, evidence.grid, evidence.closeness)


def explain_factor(factor: float, grid: Grid, closeness: float) -> Cause:
    """The cause of a constant factor, by the sizes of the mesh."""
    for axes in axis_sets(grid):
        size, name = grid.size(axes), " and ".join(map(repr, axes))
        if abs(factor - size) <= 10 * closeness * size:
            return Cause(
                "doubled-reduction",
                f"{size} times too large, the size of {name}: reduced twice over {name}, "
                "or summed where it must be averaged",
            )
        if abs(factor * size - 1) <= 10 * closeness:
            return Cause(
                "divided",
                f"{size} times too small, the size of {name}: averaged over {name} where "
                "it must be summed, or averaged twice",
            )
    text = f"right but for a constant factor of {factor:.4g}: a wrong scale"
    return Cause("factor", text)


# --- places ---------------------------------------------------------------------------


def _swapped(evidence: Evidence) -> Cause | None:
    found, expected = evidence.found, evidence.expected
    holders: dict[int, int] = {}
    for rank, value in enumerate(found):
        if evidence.close(value, expected[rank]):
            continue
        others = (r for r, part in enumerate(expected) if evidence.close(value, part))
        other = next(others, None)
        if other is None:
            return None
        holders[rank] = other
    if not holders:
        return None
    rank, other = next(iter(holders.items()))
    return Cause(
        "swapped-shards",
        f"the parts are right but in the wrong place: rank {rank} holds the part of rank "
        f"{other}: a wrong shard order",
    )


def _permuted(evidence: Evidence) -> Cause | None:
    """Blocks along a dimension in another order, as from a gather."""
    sizes = {*evidence.grid.shape, len(evidence.found), 2} - {1}
    for dim in range(evidence.expected[0].ndim):
        for size in sorted(sizes):
            if all(
                _is_permuted(evidence, value, expected, dim, size)
                for value, expected in zip(
                    evidence.found, evidence.expected, strict=True
                )
            ):
                return Cause(
                    "permuted",
                    f"the {size} blocks along dim {dim} are right but in another order: "
                    "gathered or joined in the wrong order",
                )
    return None


def _is_permuted(
    evidence: Evidence, value: torch.Tensor, expected: torch.Tensor, dim: int, size: int
) -> bool:
    if value.shape[dim] < size or value.shape[dim] % size:
        return False
    blocks = expected.chunk(size, dim)
    return all(
        any(evidence.close(part, block) for block in blocks)
        for part in value.chunk(size, dim)
    )


def _wrong_dim(evidence: Evidence) -> Cause | None:
    grid, reference = evidence.grid, evidence.reference
    for place, text in enumerate(evidence.layout):
        for dim in range(reference.ndim):
            layout = list(evidence.layout)
            layout[place] = f"S({dim})"
            if text == layout[place] or grid.shape[place] == 1:
                continue
            parts = [cut(reference, grid, tuple(layout), r) for r in grid.ranks]
            if all(map(_same_numbers, evidence.found, parts)):
                return Cause(
                    "wrong-dim",
                    f"what the ranks hold is the value cut on dim {dim} over "
                    f"{grid.names[place]!r}: a wrong shard dim",
                )
    return None


def _same_numbers(value: torch.Tensor, part: torch.Tensor) -> bool:
    if value.numel() != part.numel():
        return False
    flat = value.flatten()
    turned = part.transpose(0, -1) if part.ndim > 1 else part
    return torch.equal(flat, part.flatten()) or torch.equal(flat, turned.flatten())


def _mask(evidence: Evidence) -> Cause | None:
    differing = masked = 0
    for value, expected in zip(evidence.found, evidence.expected, strict=True):
        is_wrong = evidence.wrong_elements(value, expected)
        differing += int(is_wrong.sum())
        masked += int((is_wrong & ((value == 0) != (expected == 0))).sum())
    if differing < 3 or masked < 0.95 * differing:
        return None
    return Cause(
        "random-mask",
        "values are right, or zeroed in other places: dropout draws another mask than on "
        "one device; give the ranks one seed, or set p=0 for the check",
    )


# --- what is left ---------------------------------------------------------------------


def _some_ranks(evidence: Evidence) -> Cause | None:
    wrong, world = evidence.wrong_ranks, len(evidence.found)
    if not 0 < len(wrong) < world:
        return None
    names = ", ".join(map(str, wrong))
    return Cause(
        "some-ranks",
        f"only rank {names} of {world} differ: a part that these ranks handle otherwise "
        "(an uneven shard, an offset, a missing broadcast)",
    )


def _ranks_differ(evidence: Evidence) -> Cause | None:
    if evidence.ranks_agree():
        return None
    return Cause(
        "ranks-differ",
        "ranks hold different values where they must be equal: a reduction or a broadcast "
        "is missing, or ranks computed from different inputs",
    )


def _rounding(evidence: Evidence) -> Cause | None:
    size = largest(evidence.reference)
    if not size or evidence.error > 1e-2 * size or evidence.kind is Kind.PARAMETER:
        return None
    return Cause(
        "precision",
        "a small difference: a lower precision in the parallel run, a rounding that "
        "grew, or a small term that is missing",
    )


def _some_places(evidence: Evidence) -> Cause | None:
    """Wrong only in a few places, on every rank."""
    pairs = list(zip(evidence.found, evidence.expected, strict=True))
    wrong = sum(int(evidence.wrong_elements(*pair).sum()) for pair in pairs)
    total = sum(value.numel() for value, _ in pairs)
    if not 0 < wrong < 0.5 * total:
        return None
    return Cause(
        "some-places",
        f"{100 * wrong / total:.2g} % of the elements differ, on all ranks: wrong at "
        "shard boundaries or for some rows only (padding, offsets, masks, ignored rows)",
    )


def _local_rows(evidence: Evidence) -> Cause | None:
    pairs = zip(evidence.grid.names, evidence.layout, strict=True)
    axes = [
        name for name, text in pairs if name in evidence.data_axes and text == "S(0)"
    ]
    if not axes or evidence.kind is not Kind.FORWARD:
        return None
    return Cause(
        "local-rows",
        f"every rank along {' and '.join(map(repr, axes))} differs: something is computed "
        "over this rank's rows alone (batch norm, a mean or a count over the batch)",
    )


_PATTERNS: tuple[Pattern, ...] = (
    _not_finite,
    _zero,
    _stale,
    _accumulated,
    _missing_reduction,
    _factor_of_update,
    _constant_factor,
    _swapped,
    _permuted,
    _wrong_dim,
    _factor_beside_offset,
    _mask,
    _some_ranks,
    _ranks_differ,
    _rounding,
    _some_places,
    _local_rows,
)
