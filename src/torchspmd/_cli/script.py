"""Run a user's script inside this process, and record whole optimizer steps of it."""

import argparse
import contextlib
import os
import runpy
import shlex
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self
from unittest import mock

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from torchspmd import _torch
from torchspmd.comm import Ledger, format_count
from torchspmd.errors import SpmdError, UsageError
from torchspmd.step.compiled import CompiledStep
from torchspmd.step.progress import StatusLine
from torchspmd.trace import CommDebugMode
from torchspmd.trace.modules import follow, unfollow
from torchspmd.trace.rounds import Rounds, Turn

_PACKAGE = str(Path(_torch.__file__).parents[1])


def run_script(
    script: Path,
    arguments: Sequence[str],
    *watchers: contextlib.AbstractContextManager[object],
    left: list[object] | None = None,
) -> bool:
    """Run it while the watchers are at work; False when it fails.

    Args:
        script: The file.
        arguments: Its ``sys.argv[1:]``.
        watchers: Entered before it runs.
        left: Takes what the script leaves behind; without it, all of it is freed at once.
    """
    left = [] if left is None else left
    argv = [str(script), *arguments]
    path = [str(script.absolute().parent), *sys.path[1:]]
    with mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", path):
        try:
            with contextlib.ExitStack() as stack:
                for watcher in watchers:
                    stack.enter_context(watcher)
                left.append(runpy.run_path(str(script), run_name="__main__"))
        except EndOfWindow as end:
            left.append(end)  # the frames of an exception hold the script's globals
        except SystemExit as end:
            left.append(end)
            return end.code in (None, 0) or _is_after_window(end)
        except Exception as error:
            left.append(error)
            if _is_after_window(error):
                return True
            _print_error(error, script)
            return False
    return True


def _is_after_window(error: BaseException) -> bool:
    """Whether it was raised while the script was ended, as by a trainer that cleans up."""
    while error.__context__ is not None:
        error = error.__context__
        if isinstance(error, EndOfWindow):
            return True
    return False


def _print_error(error: Exception, script: Path) -> None:
    """The script's part of the traceback; where we refuse its call, that is the last."""
    told = traceback.TracebackException(type(error), error, _own_frames(error, script))
    if isinstance(error, SpmdError):
        while told.stack and told.stack[-1].filename.startswith(_PACKAGE):
            told.stack.pop()
    print(*told.format(), sep="", end="", file=sys.stderr)


def _own_frames(error: BaseException, script: Path) -> TracebackType | None:
    """The script's part of a traceback, without the frames that started it.

    All of it where it never came to run, but for a mistake in its syntax.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    if frames is None and not isinstance(error, SyntaxError):
        return error.__traceback__
    return frames


# ----------------------------------------------------------------------------
# Which part of a script's run is recorded: whole optimizer steps.


class EndOfWindow(BaseException):
    """Ends the script: all steps that were asked for are recorded.

    Not an ``Exception``, so that the script's own error handling lets it pass.
    """


# How far a script goes on that has made an optimizer which makes no step. Counts and no
# clock: every machine must predict the same. 100,000 operators are rehearsed in about 20 s.
_MOST_STEPS, _MOST_OPERATORS = 32, 100_000


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
        line: Says how far it is.
        num_operators: How many operators have run; with it, the script goes on for a while
            where an optimizer has made no step yet, so that a whole iteration is recorded.
            For one step only.
    """

    def __init__(
        self,
        mode: CommDebugMode,
        *,
        skip: int,
        steps: int,
        line: StatusLine,
        num_operators: Callable[[], int] | None = None,
    ) -> None:
        self.setup: Ledger | None = None
        self.num_optimizer_steps = 0
        self._mode = mode
        self._skip = skip
        self._steps = steps
        self._line = line
        self._num_operators = num_operators if steps == 1 else None
        self._waiting_since: int | None = None  # operators that had run
        self.after_first_step: Callable[[], None] | None = None  # may end the run
        self._at_boundary = True
        self._rounds = Rounds()
        self._in_compiled_step = False
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
        if self._at_boundary and not self._in_compiled_step:
            self._begin_step()

    def _begin_step(self) -> None:
        done = self.num_optimizer_steps
        if self._steps and done >= self._skip + self._steps:
            if not self._waits_for_others():
                raise EndOfWindow  # again, where somebody has caught it
            self._mode.take_ledger()
        self._at_boundary = False
        if done == 1 and self.after_first_step is not None:
            self.after_first_step()
        total = self._skip + self._steps
        self._line.show(f"step {done + 1}" + (f" of {total}" if self._steps else ""))
        if self.setup is None:
            self.setup = self._mode.take_ledger()
        elif done == self._skip:
            self._mode.take_ledger()

    def _waits_for_others(self) -> bool:
        """Whether optimizers are idle that may still make a step."""
        if self._num_operators is None or not self._rounds.idle:
            return False
        operators = self._num_operators()
        if self._waiting_since is None:
            self._waiting_since = operators
        waited = self.num_optimizer_steps - self._skip
        return (
            waited < _MOST_STEPS and operators - self._waiting_since < _MOST_OPERATORS
        )

    def leave(self) -> None:
        """A module's call ends: nothing to do."""

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
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
            self._skip = max(self._skip, int(self._num_operators is not None))
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


# ----------------------------------------------------------------------------
# Words of the command line: ours, and those of a script.


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those after ``--``, which are for a script.

    >>> split_words(["trace", "a.py", "--", "--layers", "2"])
    (['trace', 'a.py'], ['--layers', '2'])
    """
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def refuse_words(
    parser: argparse.ArgumentParser, options: argparse.Namespace, unknown: list[str]
) -> NoReturn:
    """End on words that are no options of the subcommand; a script may want them."""
    words = shlex.join(unknown)
    hint = ""
    if "script" in options:
        command = f"{parser.prog} {shlex.quote(str(options.script))} ... -- {words}"
        hint = f". Arguments of the script go after --, as in {command}"
    parser.error(f"unrecognized arguments: {words}{hint}")


def typed_command(options: argparse.Namespace) -> str:
    """The command as it can be typed again."""
    return shlex.join(["torchspmd", *options.words])


# ----------------------------------------------------------------------------
# Files that a command is given, looked at before anything runs.


def add_script_options(parser: argparse.ArgumentParser) -> None:
    """The script, and which of its steps are recorded as which rank."""
    parser.add_argument("script", type=Path)
    add_step_options(parser)


def add_step_options(parser: argparse._ActionsContainer) -> None:
    """Which steps of a script are recorded, as which rank."""
    parser.add_argument("--rank", type=int, default=0, help="the rank to play (0)")
    parser.add_argument(
        "--steps",
        type=int,
        default=1,
        help="optimizer steps to record; 0: all (%(default)s)",
    )
    parser.add_argument(
        "--skip",
        type=int,
        default=0,
        help="optimizer steps to let pass before (%(default)s)",
    )


def add_fake_options(parser: argparse._ActionsContainer) -> None:
    """Whether tensors hold memory, and which GPU and nodes a script is shown then."""
    parser.add_argument(
        "--fake",
        action="store_true",
        help="tensors hold no memory: for models of any size, and scripts for GPUs",
    )
    parser.add_argument(
        "--gpu", help="with --fake: what the script is told of its GPU, as in h100"
    )
    parser.add_argument(
        "--gpus-per-node", type=int, help="with --fake: ranks of a node (8)"
    )


def fake_problems(options: argparse.Namespace, *, fake: bool) -> list[str]:
    """What is wrong with the options that go with ``--fake``."""
    problems = []
    if options.gpus_per_node is not None and options.gpus_per_node < 1:
        problems.append("--gpus-per-node must be at least 1")
    if not fake and (options.gpu or options.gpus_per_node is not None):
        problems.append("--gpu and --gpus-per-node are for --fake: add it")
    return problems


def script_problems(script: Path, steps: int, skip: int) -> list[str]:
    """Why there is no script to run, or no steps of it to record."""
    problems = []
    if script.is_dir():
        problems.append(f"{script} is a folder, not a script")
    elif not script.is_file():
        problems.append(f"there is no script {script}")
    if steps < 0 or skip < 0:
        problems.append("--steps and --skip cannot be negative")
    return problems


def output_problems(path: Path | None, option: str, example: str) -> list[str]:
    """Why nothing can be written there; empty where it can, or none is asked for.

    >>> output_problems(Path("/"), "--out", "report.json")
    ['--out / is a folder: name a file in it, as in /report.json']
    """
    if path is None:
        return []
    if str(path) == "-":
        return [f"{option} -: name a file, or /dev/stdout"]
    if path.is_dir():
        named = path / example
        return [f"{option} {path} is a folder: name a file in it, as in {named}"]
    if not path.absolute().parent.is_dir():
        return [f"there is no folder {path.parent} for {option}"]
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        return [f"{option} {path}: you may not write there; name another folder"]
    return []
