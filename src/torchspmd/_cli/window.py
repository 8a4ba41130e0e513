"""Which part of a script's life is recorded: whole optimizer steps."""

import contextlib
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from unittest import mock

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from torchspmd import _torch
from torchspmd._cli.output import Progress
from torchspmd.comm import Ledger
from torchspmd.errors import UsageError
from torchspmd.step.compiled import CompiledStep
from torchspmd.trace import CommDebugMode
from torchspmd.trace.modules import follow, unfollow


class EndOfWindow(BaseException):
    """Ends the script: all steps that were asked for are recorded.

    Not an ``Exception``, so that the script's own error handling lets it pass.
    """


class StepWindow:
    """Keeps in the mode's ledger the steps that were asked for, and ends after them.

    A step ends when the first module is called after ``optimizer.step()``; a call of a
    compiled step that updates parameters is one step, whatever it does inside. What happens
    before the first of these calls is set-up and goes to a ledger of its own.
    """

    def __init__(
        self, mode: CommDebugMode, *, skip: int, steps: int, progress: Progress
    ) -> None:
        self.setup: Ledger | None = None
        self.num_optimizer_steps = 0
        self._mode = mode
        self._skip = skip
        self._steps = steps
        self._progress = progress
        self._at_boundary = True
        self._in_compiled_step = self._captured_update = False
        # Compiled steps that update parameters: seen while one is captured, not later.
        self._updating: weakref.WeakSet[CompiledStep] = weakref.WeakSet()
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
        plural = "" if made == 1 else "s"
        raise UsageError(
            f"--skip {self._skip}: the script made only {made} optimizer step{plural}, so "
            f"none is left to record. Record with --skip {made - 1} or less, or let the "
            "script make more steps."
        )

    def __enter__(self) -> Self:
        plain_call = CompiledStep.__call__

        def call(step: CompiledStep, *args: Any, **kwargs: Any) -> Any:
            return self._call_compiled(plain_call, step, args, kwargs)

        hook = register_optimizer_step_post_hook(self._after_step)
        self._exits.callback(hook.remove)
        self._exits.enter_context(mock.patch.object(CompiledStep, "__call__", call))
        follow(self)
        self._exits.callback(unfollow, self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    def enter(self, module: nn.Module) -> None:
        """A module is called: the first one since a step begins the next."""
        if self._at_boundary and not self._in_compiled_step:
            self._begin_step()

    def _begin_step(self) -> None:
        self._at_boundary = False
        done = self.num_optimizer_steps
        if self._steps and done >= self._skip + self._steps:
            raise EndOfWindow
        self._progress.step(done + 1, self._skip + self._steps)
        if self.setup is None:
            self.setup = self._mode.take_ledger()
        elif done == self._skip:
            self._mode.take_ledger()

    def leave(self) -> None:
        """A module's call ends: nothing to do."""

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._in_compiled_step:
            self._end_step()
        elif _torch.is_tracing_for_compile():
            self._captured_update = True

    def _end_step(self) -> None:
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
        self._in_compiled_step, self._captured_update = True, False
        try:
            result = call(step, *args, **kwargs)
        finally:
            self._in_compiled_step = False
        if self._captured_update:
            self._updating.add(step)
        if step in self._updating:
            self._end_step()
        return result
