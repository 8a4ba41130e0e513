"""The programs of a step: which one serves a call, and which one to build for it."""

import textwrap
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

from torchspmd.errors import CaptureWarning
from torchspmd.step.capture.dynamic_shapes import (
    Sizes,
    differing_sizes,
    input_shapes,
    sizes_of,
    with_any_size,
)
from torchspmd.step.capture.guard_cache import GuardCache
from torchspmd.step.capture.guards import Signature, explain_difference, sign
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.parallel_mode import ParallelMode
from torchspmd.step.capture.rank_divergence import find_other_axes
from torchspmd.step.program import Program
from torchspmd.step.rank_agreement import Agreement, share_shapes

MANY_PROGRAMS = 8  # from here on more are told of, whenever they have doubled
MAX_PROGRAMS = 64  # that are kept: the one that was not used for the longest time goes


@dataclass(frozen=True, slots=True)
class Request:
    """Which program to build.

    Attributes:
        number: Which program of its step it is.
        reason: Why it is needed.
        sizes: The sizes of tensor arguments that are to be symbols, if that is possible.
        like: A program of the same step for other sizes. Where both send the same, other
            ranks need not be asked: they may be running that one.
        known: The programs that are there.
        has_own_batches: Whether ranks may have batches of other shapes.
        agreed: How many programs the ranks have agreed on.
        notes: What is known about it already, a line each.
    """

    number: int
    reason: str
    sizes: Sizes | None = None
    like: Program | None = None
    known: tuple[Program, ...] = ()
    has_own_batches: bool = False
    agreed: int = 0
    notes: tuple[str, ...] = ()


@final
class Programs:
    """The programs of one step.

    Attributes:
        kept: Those that are there, oldest first.
        num_built: How many were built.
        num_agreed: How many of these all ranks have agreed on.
    """

    def __init__(self) -> None:
        self.kept: list[Program] = []
        self.num_built = self.num_agreed = 0
        self._by_signature: dict[Signature, list[Program]] = {}
        self._known = GuardCache[Program]()
        self._any_sizes: dict[str, frozenset[int]] = {}  # that took a second value
        self._has_fixed_sizes = False  # whether symbols for them were of no use
        self._masks: list[dict[str, frozenset[int]]] = []  # of programs for any size

    def recall(self, args: Any, kwargs: Any) -> tuple[Program, Inventory] | None:
        """The program of an earlier call with the same objects, and what it works on."""
        return self._known.find(args, kwargs)

    def remember(self, inventory: Inventory, program: Program) -> None:
        """Have ``recall`` find this call."""
        self._known.add(inventory, program)

    def find(self, inventory: Inventory) -> Program | None:
        """The program that serves a call."""
        signature = sign(inventory)
        found = [self._by_signature.get(signature, ())]
        for dims in self._masks:
            found.append(self._by_signature.get(with_any_size(signature, dims), ()))
        fitting = chain.from_iterable(found)
        return next((each for each in fitting if each.accepts(inventory)), None)

    def why_none_fits(self, inventory: Inventory) -> str:
        """What kept each program from serving a call."""
        if not self.kept:
            return "first call"
        signature = sign(inventory)
        for program in self._by_signature.get(signature, ()):
            broken = program.broken_assumptions(inventory)
            if broken:
                lines = [f"not {line}" for line in broken]
                return f"differs from program {program.number}:\n" + "\n".join(lines)
        latest = self.kept[-1]
        lines = explain_difference(latest.signature, signature)
        return f"differs from program {latest.number}:\n" + "\n".join(lines)

    def request(
        self,
        inventory: Inventory,
        mode: ParallelMode,
        ranks: Agreement,
        reason: str,
        *,
        backend: str,
        measures_cost: bool,
    ) -> Request:
        """Which program to build: for which sizes, and whether other ranks are asked."""
        signature = sign(inventory)
        others = find_other_axes(inventory.slots, mode.sharded_over)
        has_own = mode.has_own_batches and not others
        like = self._find_like(signature)
        is_local = has_own and like is not None and not measures_cost
        shapes: Mapping[str, tuple[int, ...]]
        shapes = input_shapes(signature) if like is None else like.shapes
        if has_own and not is_local:
            shapes, self._any_sizes = share_shapes(ranks, shapes, self._any_sizes)
        sizes, fixed = None, ""
        if self._any_sizes:
            fixed = self._why_fixed(mode, has_own, backend)
            if not fixed:
                sizes = sizes_of(signature, self._any_sizes, shapes)
        return Request(
            number=self.num_built,
            reason="\n".join(filter(None, (reason, fixed))),
            sizes=sizes,
            like=like if is_local else None,
            known=tuple(self.kept),
            has_own_batches=has_own,
            agreed=self.num_agreed,
        )

    def _why_fixed(
        self, mode: ParallelMode, has_own_batches: bool, backend: str
    ) -> str:
        """Why sizes that change cannot be symbols; empty where they can."""
        if backend in ("inductor", "cudagraph"):
            why = f"backend={backend!r} compiles for each"
        elif has_own_batches and any(map(_may_be_compiled, self.kept)):
            why = (
                "backend='auto' has Inductor compile for each, as for the sizes before"
            )
        elif mode.mesh is not None and not has_own_batches:
            why = "what ranks send may depend on them"
        elif self._has_fixed_sizes:
            why = "they could not be symbols of a graph, see an earlier program"
        else:
            return ""
        return f"one program for each size: {why}"

    def _find_like(self, signature: Signature) -> Program | None:
        """The latest program that differs from a call in sizes of its batch alone."""
        for program in reversed(self.kept):
            found = differing_sizes(program.signature, signature)
            if found:
                for name, dims in found.items():
                    known = self._any_sizes.get(name, frozenset())
                    self._any_sizes[name] = known | dims
                return program
        return None

    def add(self, program: Program, request: Request, mode: ParallelMode) -> None:
        """Keep a program that was built, and let go of one where there are many."""
        self.num_built += 1
        self.num_agreed += program.agreed == request.agreed
        if request.sizes is not None and program.sizes is None:
            # A size of 0 or 1 is always one of its own.
            sizes = chain.from_iterable(input_shapes(program.signature).values())
            self._has_fixed_sizes |= min(sizes) > 1
        self.kept.append(program)
        self._by_signature.setdefault(program.signature, []).append(program)
        if program.sizes is not None and program.sizes.dims not in self._masks:
            self._masks.append(dict(program.sizes.dims))
        if len(self.kept) > MAX_PROGRAMS:
            self._drop_oldest(program, is_alone=not mode.has_own_batches)

    def replace(self, old: Program, new: Program) -> None:
        """Have another program serve the calls of one, if that is still there."""
        alike = self._by_signature.get(old.signature, [])
        for programs in (self.kept, alike):
            programs[:] = [new if each is old else each for each in programs]
        self._known.drop(old)

    def _drop_oldest(self, newest: Program, *, is_alone: bool) -> None:
        # A rank that has to agree again with others must not be alone in that.
        agreed = Counter(each.agreed for each in self.kept)
        candidates = [
            each
            for each in self.kept
            if each is not newest
            and not each.is_pending
            and (is_alone or agreed[each.agreed] > 1)
        ]
        if candidates:
            oldest = min(candidates, key=lambda each: each.last_call)
            self.kept.remove(oldest)
            self._by_signature[oldest.signature].remove(oldest)
            self._known.drop(oldest)


def _may_be_compiled(program: Program) -> bool:
    """Whether ranks may run Inductor's code of a program, now or later."""
    return program.choice is not None and "inductor" in program.choice.needed


def warn_of_many(name: str, number: int, reason: str) -> None:
    """Warn of one more program where there are many."""
    if number >= MANY_PROGRAMS and number.bit_count() == 1:  # 8, 16, 32, ...
        warnings.warn(
            f"compile on {name!r}: {number} programs are captured already and this call "
            f"fits none of them, so that it is captured again, which takes as long as "
            f"many steps.\n\n{textwrap.indent(reason, '  ')}\n\nKeep what changes "
            "constant (pad batches to some shapes), pass it as a tensor (also a number "
            "that the step reads from an object or a variable and that is another one in "
            "each call: torch.tensor(x), or a float argument), count what the step does "
            "not need where it is called, or make the optimizer with foreach=True where a "
            f"schedule changes more than its lr. At most {MAX_PROGRAMS} programs are kept.",
            CaptureWarning,
            stacklevel=4,
        )
