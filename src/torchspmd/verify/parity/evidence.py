"""What is known of a difference, and the questions that patterns ask of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchspmd.verify.parity.match import Match, difference, largest
from torchspmd.verify.recording.files import Kind
from torchspmd.verify.recording.layouts import Grid, Layout, cut

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Cause:
    """A short name for programs, and a sentence for people."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """A difference between what ranks hold and what one device has."""

    kind: Kind
    match: Match
    reference: torch.Tensor
    grid: Grid
    data_axes: tuple[str, ...]
    closeness: float  # relative difference up to which a pattern fits
    before: torch.Tensor | None = None  # the reference one step earlier

    @property
    def found(self) -> tuple[torch.Tensor, ...]:
        """What each rank holds."""
        return self.match.found

    @property
    def expected(self) -> tuple[torch.Tensor, ...]:
        """What each rank should hold."""
        return self.match.expected

    @property
    def layout(self) -> Layout:
        """How the value lies over the mesh."""
        return self.match.layout

    @property
    def error(self) -> float:
        """The largest absolute difference."""
        return self.match.error

    @property
    def wrong_ranks(self) -> tuple[int, ...]:
        """The ranks that hold something else than they should."""
        return self.match.wrong_ranks

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

    def sums(self, axes: tuple[str, ...]) -> list[torch.Tensor] | None:
        """For each rank the sum over the ranks along some axes; None if shapes differ."""
        found, sums = self.found, []
        for rank in range(len(found)):
            team = [found[other].double() for other in self.grid.along(rank, axes)]
            if any(part.shape != team[0].shape for part in team):
                return None
            sums.append(torch.stack(team).sum(0))
        return sums

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
