"""Random ops while a step is traced: a recomputation repeats those of the forward.

Activation checkpointing saves the generator's state before a region and sets it again
before it recomputes the region. A graph has no generator, so while a step is traced a
state is a place in the list of random ops: after it was set, the random ops that follow
give what those gave that followed it before.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.errors import CaptureError
from torchspmd.step.capture.refusals import RefusalError
from torchspmd.step.capture.shared_memory import extent_of
from torchspmd.step.capture.trace_modes import OperatorMode, replaced
from torchspmd.step.capture.user_code import calling_line
from torchspmd.step.graph.metadata import owner_of


@dataclass(frozen=True, slots=True)
class _State:
    """What ``torch.get_rng_state`` gives while a step is traced."""

    place: int


@dataclass(frozen=True, slots=True)
class _RandomOp:
    """One random op: what it was, and copies of its results, where needed."""

    operator: Any
    form: tuple[Any, ...]
    copies: tuple[torch.Tensor, ...]
    is_single: bool


_SEEDING = ("manual_seed", "manual_seed_all", "seed", "seed_all")


@final
class RandomReplay(OperatorMode):
    """Remembers the random ops of a traced step; repeats them where a state is set back."""

    def __init__(self) -> None:
        super().__init__()
        self._ops: list[_RandomOp] = []
        self._place = 0
        self._is_state_taken = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Watch what is traced inside, and replace the states of generators."""
        owners: list[Any] = [torch, torch.random]
        if torch.cuda.is_available():
            owners.append(torch.cuda)
        functions = {
            "get_rng_state": self._get_state,
            "set_rng_state": self._set_state,
            **dict.fromkeys(_SEEDING, _refuse_seed),
        }
        attributes = [
            (owner, name, function)
            for owner in owners
            for name, function in functions.items()
            if hasattr(owner, name)
        ]
        with replaced(*attributes), self:
            yield
            self._check_end()

    def _get_state(self, *_: Any) -> Any:
        self._is_state_taken = True
        return _State(self._place)

    def _set_state(self, state: Any, *_: Any) -> None:
        if not isinstance(state, _State):
            raise CaptureError(
                "compile: the step sets the state of a random generator to one from "
                "outside, which would happen once, while the step is captured. Set it "
                "before the step, or take it inside the step."
            )
        self._place = state.place

    def _check_end(self) -> None:
        if self._place < len(self._ops):
            raise CaptureError(
                "compile: the step sets a random generator back (fork_rng, set_rng_state) "
                "and leaves it so; a graph draws anew in each step and sets nothing back. "
                "Fork outside of the step, or pass what is drawn as an argument."
            )

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a random op, or repeat an earlier one."""
        if not _torch.draws_random_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        if any(_torch.layout_of(a) for a in args if isinstance(a, torch.Tensor)):
            return NotImplemented  # a DTensor: what it does to its shard is seen here
        _check_memory(func, args)
        if self._place < len(self._ops):
            return self._repeat(func, args)
        result = func(*args, **kwargs)
        self._ops.append(self._note(func, args, result))
        self._place += 1
        return result

    def _note(self, func: Any, args: tuple[Any, ...], result: Any) -> _RandomOp:
        is_single = isinstance(result, torch.Tensor)
        drawn = (result,) if is_single else tuple(result)
        # Copies, because what was drawn may be written to; kept only where a state was
        # taken before, since nothing else can come back here.
        copies = tuple(map(_copied, drawn)) if self._is_state_taken else ()
        return _RandomOp(func, _form(args), copies, is_single)

    def _repeat(self, func: Any, args: tuple[Any, ...]) -> Any:
        earlier = self._ops[self._place]
        self._place += 1
        if (
            earlier.operator is not func
            or earlier.form != _form(args)
            or not earlier.copies
        ):
            raise CaptureError(
                f"compile: a recomputed region draws random numbers with {func}, where "
                f"its forward drew them with {earlier.operator}, or in another shape. A "
                "checkpointed region must do the same each time it is run."
            )
        if _torch.written_arguments(func):
            return args[0].copy_(earlier.copies[0])
        again = tuple(map(_copied, earlier.copies))
        return again[0] if earlier.is_single else again


# From this size on torch draws in blocks, where a tensor on the CPU is contiguous.
_BLOCK = 16


def _check_memory(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse a random op whose numbers depend on gaps in memory: a graph has none."""
    if func is not torch.ops.aten.normal_.default or args[0].device.type != "cpu":
        return
    if args[0].numel() >= _BLOCK and extent_of(args[0]) != args[0].numel():
        raise RefusalError(
            "aten::normal_ on a tensor with gaps in its memory, such as x[:, 1:] or x[::2]",
            "torch draws other numbers for it than for one without gaps, and the graph "
            "works on tensors without.\nDraw into a new tensor and copy it: "
            "part.copy_(torch.randn_like(part)).",
        )


def _refuse_seed(*_: Any) -> None:
    raise CaptureError(
        "compile: the step seeds a random generator, which would happen once, while the "
        f"step is captured\n\n  * {calling_line()}\n\nSeed before the step, or draw "
        "outside and pass what was drawn as an argument."
    )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _form(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        (tuple(arg.shape), arg.dtype, arg.device)
        if isinstance(arg, torch.Tensor)
        else str(arg)
        for arg in args
    )


def check_recomputation(name: str, graph: fx.GraphModule) -> None:
    """Refuse random ops in backward that would not repeat those of the forward."""
    for node in graph.graph.nodes:
        is_random = _torch.draws_random_numbers(node.target, node.args, node.kwargs)
        owner = owner_of(node)
        in_backward = owner.phase in (Phase.RECOMPUTE, Phase.BACKWARD)
        if in_backward and is_random:
            raise CaptureError(
                f"compile on {name!r}: {owner.module} draws random numbers in backward "
                f"({node.target}). A region that is recomputed there must draw those of "
                "its forward: leave preserve_rng_state=True, use F.dropout for random "
                "numbers on a sharded batch, or take them out of the checkpointed region."
            )
