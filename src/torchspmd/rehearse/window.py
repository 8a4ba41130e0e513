"""Which part of a script's run is recorded: whole optimizer steps."""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self
from unittest import mock

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from torchspmd import _torch
from torchspmd.comm import Ledger, format_count
from torchspmd.errors import UsageError
from torchspmd.rehearse.recording import Recording
from torchspmd.rehearse.world import EndOfWindow
from torchspmd.step.compiled import CompiledStep
from torchspmd.trace import CommDebugMode
from torchspmd.trace.modules import follow, unfollow
from torchspmd.trace.rounds import Rounds, Turn

__all__ = ["StepWindow", "is_after_window"]


def is_after_window(error: BaseException) -> bool:
    """Whether it was raised while the script was ended, as by a trainer that cleans up."""
    while error.__context__ is not None:
        error = error.__context__
        if isinstance(error, EndOfWindow):
            return True
    return False


# How far a script goes on that has made an optimizer which makes no step. Counts and no
# clock: every machine must predict the same. 100,000 operators are rehearsed in about 20 s.
_MOST_STEPS, _MOST_OPERATORS = 32, 100_000
_MOST_WARM_UPS = (
    16  # before a CUDA graph is captured; DistributedDataParallel asks for 11
)


class StepWindow:
    """Keeps in the mode's ledger the steps that were asked for, and ends after them.

    A step ends when the first module is called after ``optimizer.step()``. With several
    optimizers it ends with the one that made its first step last: each that comes anew
    makes one step, the first, of all that were counted. A call of a compiled step that
    updates parameters is one step, whatever it does inside. What happens before the first
    of these calls is set-up, in a ledger of its own.

    Args:
        mode: Whose ledger it is.
        skip: Steps to let pass.
        steps: To record; 0: all.
        show: Is told how far it is.
        rehearsed: What a rehearsal fills; with it, the script goes on for a while where an
            optimizer has made no step yet, and where a CUDA graph was captured, so that a
            whole iteration is recorded that is like all that follow. For one step only.
    """

    def __init__(
        self,
        mode: CommDebugMode,
        *,
        skip: int,
        steps: int,
        show: Callable[[str], None] = lambda detail: None,
        rehearsed: Recording | None = None,
    ) -> None:
        self.setup: Ledger | None = None
        self.num_optimizer_steps = 0
        self._mode = mode
        self._skip = skip
        self._steps = steps
        self._show = show
        self._rehearsed = rehearsed if steps == 1 else None
        self._waiting_since: int | None = None  # operators that had run
        self.after_first_step: Callable[[], None] | None = None  # may end the run
        self._at_boundary = True
        self._rounds = Rounds()
        self._in_compiled_step = False
        self._thread = (
            threading.get_ident()
        )  # that trains: others do not end the script
        # What compiled steps update by: seen while one is captured, not later.
        self._captured: list[Optimizer] = []
        self._updating: weakref.WeakKeyDictionary[CompiledStep, list[Optimizer]] = (
            weakref.WeakKeyDictionary()
        )
        self._exits = contextlib.ExitStack()

    @property
    def num_recorded(self) -> int:
        """How many of the steps in the ledger are complete."""
        recorded = max(self.num_optimizer_steps - self._skip, 0)
        return min(recorded, self._steps) if self._steps else recorded

    @property
    def num_missing(self) -> int:
        """How many of the steps that were asked for the script did not make."""
        return max(self._steps - self.num_recorded, 0)

    def refuse_if_empty(self) -> None:
        """After the script: raise when all of its steps, or more, were to be skipped."""
        made = self.num_optimizer_steps
        if not self._skip or made > self._skip:
            return
        if made == 0:
            raise UsageError(
                f"--skip {self._skip}: the script made no optimizer step, so there is "
                "nothing to skip. Without --skip the whole run is recorded, from the "
                "first module call."
            )
        steps = format_count(made, "optimizer step")
        raise UsageError(
            f"--skip {self._skip}: the script made only {steps}, so none is left to "
            f"record. Record with --skip {made - 1} or less, or let the "
            "script make more steps."
        )

    def __enter__(self) -> Self:
        plain_call = CompiledStep.__call__

        def call(step: CompiledStep, *args: Any, **kwargs: Any) -> Any:
            return self._call_compiled(plain_call, step, args, kwargs)

        hook = register_optimizer_step_post_hook(self._after_step)
        self._exits.callback(hook.remove)
        self._exits.enter_context(mock.patch.object(CompiledStep, "__call__", call))
        self._exits.enter_context(self._rounds.noticing())
        follow(self)
        self._exits.callback(unfollow, self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()
        if idle := self._rounds.idle_text():
            self._mode.ledger.note(idle)

    def enter(self, module: nn.Module) -> None:
        """A module is called: the first one since a step begins the next."""
        is_beside = threading.get_ident() != self._thread
        if self._at_boundary and not self._in_compiled_step and not is_beside:
            self._begin_step()

    def _begin_step(self) -> None:
        done = self.num_optimizer_steps
        if self._steps and done >= self._skip + self._steps:
            if not self._goes_on():
                raise EndOfWindow  # again, where somebody has caught it
            self._mode.take_ledger()
        self._at_boundary = False
        if done == 1 and self.after_first_step is not None:
            self.after_first_step()
        total = self._skip + self._steps
        self._show(f"step {done + 1}" + (f" of {total}" if self._steps else ""))
        if self.setup is None:
            self.setup = self._mode.take_ledger()
        elif done == self._skip:
            self._mode.take_ledger()

    def _goes_on(self) -> bool:
        """Whether idle optimizers may still make a step, or a steady one is to come."""
        recording = self._rehearsed
        if recording is None:
            return False
        waited = self.num_optimizer_steps - self._skip
        if recording.warms_up and waited < _MOST_WARM_UPS:
            return True
        if not self._rounds.idle:
            return False
        operators = recording.num_operators
        if self._waiting_since is None:
            self._waiting_since = operators
        return (
            waited < _MOST_STEPS and operators - self._waiting_since < _MOST_OPERATORS
        )

    def leave(self) -> None:
        """A module's call ends: nothing to do."""

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._thread = threading.get_ident()
        if not self._in_compiled_step:
            self._end_step(self._rounds.after(optimizer))
        elif _torch.is_tracing_for_compile():
            self._captured.append(optimizer)

    def _end_step(self, turn: Turn) -> None:
        if turn is Turn.WITHIN or (self._at_boundary and self.setup is not None):
            return  # another optimizer of the same step, or one inside of another
        if turn is Turn.NEW and self.num_optimizer_steps:
            self.num_optimizer_steps = 0
            # The first round is not known as one while it is made: one more is.
            self._skip = max(self._skip, int(self._rehearsed is not None))
        self.num_optimizer_steps += 1
        self._at_boundary = True

    def _call_compiled(
        self,
        call: Callable[..., Any],
        step: CompiledStep,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._at_boundary:
            self._begin_step()
        self._in_compiled_step, self._captured = True, []
        try:
            result = call(step, *args, **kwargs)
        finally:
            self._in_compiled_step = False
        if self._captured:
            self._updating[step] = self._captured
        if step in self._updating:
            self._end_step(self._rounds.after(*self._updating[step]))
        return result
