"""``expect(ledger)``: what a step may communicate, written as a test."""

import difflib
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchspmd.comm import GLOBAL, Key, Ledger, format_bytes
from torchspmd.errors import ContractError, UsageError
from torchspmd.trace.tables import ON_REPLAY
from torchspmd.verify.contract.claim import (
    Bound,
    Claim,
    Expected,
    Part,
    matches,
    read_claims,
)
from torchspmd.verify.contract.text import near_misses, note_lines, origin_lines


def expect(
    ledger: Ledger,
    *,
    model: nn.Module | None = None,
    mesh: DeviceMesh | None = None,
    checks: bool = False,
) -> "Contract":
    """Say what a recorded step may communicate; whatever differs raises.

    Each claim is judged at once. In a ``with`` block all of them are, and one error
    lists every claim that does not hold.

    Args:
        ledger: What was recorded, for instance ``comm_mode.ledger``.
        model: For numbers that are functions of the model, and to refuse names of
            modules that it does not have.
        mesh: To refuse names of axes that it does not have.
        checks: Count the communication of run-time checks too.

    Example:
        >>> from torchspmd.comm import CommEvent, Group, Kind
        >>> group = Group("0", (0, 1), axis="tp")
        >>> ledger = Ledger()
        >>> for _ in range(4):
        ...     ledger.append(CommEvent(Kind.ALL_REDUCE, "c10d.allreduce_", "float32",
        ...                             (8,), 32, 32, group))
        >>> num_layers = 2
        >>> claims = expect(ledger).count(all_reduce=2 * num_layers, axis="tp")
        >>> _ = claims.payload_bytes(all_reduce=4 * 32).nothing_else()
        >>> try:
        ...     expect(ledger).count(0, phase="forward")
        ... except ContractError as error:
        ...     print(error)
        expect: the ledger differs from what was expected.
        <BLANKLINE>
        count of communication in forward: expected 0, got 4 (4 too many)
            4 all_reduce over tp, 128 B, forward of Global
        <BLANKLINE>
        For the lines of the program, record with sources=True.
    """
    if not isinstance(ledger, Ledger):
        fix = ", such as comm_mode.ledger" if hasattr(ledger, "ledger") else ""
        raise UsageError(
            f"expect() takes a Ledger{fix}; it was given a {type(ledger).__name__}."
        )
    return Contract(ledger, model, mesh, checks)


class Contract:
    """Claims about one ledger; made by ``expect``.

    >>> contract = Contract(Ledger(), None, None, checks=False)
    >>> contract.count(0) is contract
    True
    """

    def __init__(
        self,
        ledger: Ledger,
        model: nn.Module | None,
        mesh: DeviceMesh | None,
        checks: bool,
    ) -> None:
        self._ledger = ledger
        self._rows = {
            key: total for key, total in ledger.rows.items() if checks or not key.check
        }
        self._model = model
        self._axes = None if mesh is None else mesh.mesh_dim_names or ()
        self._parts: list[Part] = []
        self._problems: list[str] | None = None  # a list inside a with block
        self._may_be_empty = len(ledger) > 0
        if ON_REPLAY in ledger.notes:
            raise ContractError(f"expect: the ledger is not complete: {ON_REPLAY}.")

    def count(
        self, total: Expected | None = None, /, **kinds_and_where: Any
    ) -> "Contract":
        """How many communications there are, by kind or of all kinds together.

        ``count(all_reduce=2 * n, all_gather=at_most(3), axis="tp", phase="forward")``;
        ``count(0, phase="optimizer")`` for nothing at all.

        Args:
            total: The number for all kinds together.
            **kinds_and_where: Kinds with their numbers, and what narrows them: ``axis``,
                ``phase``, ``dtype`` (one or a tuple of them), ``module`` (a path in
                which ``*`` stands for one part, the root's class left out if you like;
                what lies inside counts, unless ``within=False``), ``implicit``.
        """
        __tracebackhide__ = True
        return self._claim("count", total, kinds_and_where)

    def payload_bytes(
        self, total: Expected | None = None, /, **kinds_and_where: Any
    ) -> "Contract":
        """How many bytes the logical buffers have; arguments as in ``count``."""
        __tracebackhide__ = True
        return self._claim("payload_bytes", total, kinds_and_where)

    def wire_bytes(
        self, total: Expected | None = None, /, **kinds_and_where: Any
    ) -> "Contract":
        """How many bytes a rank sends in a ring; arguments as in ``count``."""
        __tracebackhide__ = True
        return self._claim("wire_bytes", total, kinds_and_where)

    def forbid_implicit(self, **where: Any) -> "Contract":
        """DTensor redistributed no operand by itself; ``where`` narrows as in ``count``."""
        __tracebackhide__ = True
        return self._claim("count", 0, {**where, "implicit": True})

    def nothing_else(self) -> "Contract":
        """Whatever no claim before this one speaks of did not happen."""
        __tracebackhide__ = True
        rest = [
            (key, total)
            for key, total in self._rows.items()
            if total.count and not any(part.holds(key) for part in self._parts)
        ]
        if rest:
            count = sum(total.count for _, total in rest)
            lines = [
                f"nothing else was expected, got {count} more that no claim speaks of",
                *origin_lines(self._ledger, rest),
            ]
            self._fail(["\n".join(lines)])
        return self

    def __enter__(self) -> Self:
        self._problems = []
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        __tracebackhide__ = True
        problems, self._problems = self._problems, None
        if problems and error is None:
            self._fail(problems)

    def _claim(
        self, measure: str, total: Expected | None, words: dict[str, Any]
    ) -> "Contract":
        __tracebackhide__ = True
        problems = []
        for claim in read_claims(measure, total, words, self._model):
            self._check_names(claim.part)
            self._parts.append(claim.part)
            came = claim.read(self._rows.items())
            if came not in claim.bound:
                problems.append(self._problem(claim, came))
            elif claim.says_nothing_is_sent:
                self._may_be_empty = True
            else:
                self._refuse_empty()
        if problems:
            self._fail(problems)
        return self

    def _refuse_empty(self) -> None:
        """An upper bound on a ledger without any event holds whatever the program does."""
        __tracebackhide__ = True
        if not self._may_be_empty:
            self._may_be_empty = True  # said once
            self._fail(
                [
                    "the ledger is empty: no communication was recorded, so that every "
                    "upper bound holds. Record the step inside `with CommDebugMode()`; if "
                    "nothing is meant to be sent, say so first: expect(ledger).count(0)."
                ]
            )

    def _problem(self, claim: Claim, came: int) -> str:
        part, rows = claim.part, self._rows.items()
        lines = [_headline(claim, came)]
        lines += origin_lines(
            self._ledger, [(key, total) for key, total in rows if part.holds(key)]
        )
        if claim.bound.low is not None and came < claim.bound.low:
            missed = near_misses(rows, lambda key: _almost(key, part))
            if missed is not None:
                lines.append(f"    not counted, since they lie elsewhere: {missed}")
        return "\n".join(lines)

    def _fail(self, problems: list[str]) -> None:
        __tracebackhide__ = True
        if self._problems is not None:
            self._problems += problems
            return
        first = "expect: the ledger differs from what was expected."
        if len(problems) > 1:
            first = f"expect: the ledger differs from {len(problems)} expectations."
        notes = "\n".join(note_lines(self._ledger))
        raise ContractError(
            "\n\n".join([first, *problems, *([notes] if notes else [])])
        )

    def _check_names(self, part: Part) -> None:
        """Refuse a name that nothing has: a claim on it would always hold."""
        if self._axes is not None and part.axis is not None:
            seen = {key.axis for key in self._rows}
            for axis in part.axis:
                if axis not in {*self._axes, *seen}:
                    raise UsageError(
                        f"expect: the mesh has no axis {axis!r}; its axes are "
                        f"{', '.join(self._axes) or 'without names'}."
                    )
        if self._model is not None and part.module not in (None, GLOBAL):
            assert part.module is not None
            self._check_module(self._model, part.module)

    def _check_module(self, model: nn.Module, pattern: str) -> None:
        root = type(model).__name__
        names = [
            f"{root}.{name}" if name else root for name, _ in model.named_modules()
        ]
        seen = [key.module for key in self._rows]
        if not any(matches(name, pattern, within=False) for name in names + seen):
            near = difflib.get_close_matches(pattern, names, 3, 0.4)
            hint = f" Near to it: {', '.join(near)}." if near else ""
            raise UsageError(
                f"expect: {root} has no module that fits {pattern!r}.{hint}"
            )


def _almost(key: Key, part: Part) -> bool:
    return (part.kind is None or key.kind == part.kind) and not part.holds(key)


def _headline(claim: Claim, came: int) -> str:
    bound, what = claim.bound, claim.measure.replace("_", " ")
    distance = _distance(bound, came)
    size = "" if claim.measure == "count" else f" ({format_bytes(came)})"
    return f"{what} of {claim.part}: expected {bound}, got {came}{size} ({distance})"


def _distance(bound: Bound, came: int) -> str:
    if bound.low is not None and came < bound.low:
        return f"{bound.low - came} too few"
    assert bound.high is not None, bound
    return f"{came - bound.high} too many"
