"""Updates that a step left for the next one, and everything that must not miss them."""

import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchspmd.errors import PassWarning, UsageError
from torchspmd.step.capture.inventory import Inventory, Role
from torchspmd.step.lost_states import LostStates
from torchspmd.step.program import Program

# What shows or changes parameters and states from outside the step.
_OF_MODULES = (
    "state_dict",
    "load_state_dict",
    "train",  # also what eval() calls
    "named_parameters",
    "named_buffers",
)
_OF_OPTIMIZERS = ("state_dict", "load_state_dict", "add_param_group", "step")
# Of a score: a call with other tensors adds two, one that overlaps takes one away.
_TOO_OFTEN = 6


class Pending:
    """What one program owes, until it is flushed."""

    def __init__(self, name: str, program: Program, flush: Callable[[], None]) -> None:
        self._name, self._program = name, program
        self._flush = flush
        self._inventory: Inventory | None = None
        self._watched: list[_Watched | _Hook] = []
        self._lost: LostStates | None = None
        self._at_exit = weakref.finalize(self, _report_unflushed, name)

    def belongs_to(self, program: Program | None, inventory: Inventory) -> bool:
        """Whether a call can do what is owed: the same program on the same tensors.

        Not after an exception that came when some of it was done: the rest goes first.
        """
        if program is not self._program or self._inventory is None:
            return False
        if program.is_interrupted:
            return False
        pairs = zip(self._inventory.slots, inventory.slots, strict=True)
        return all(
            old.tensor is new.tensor or old.role is Role.INPUT for old, new in pairs
        )

    def note_other_tensors(self, program: Program | None, inventory: Inventory) -> None:
        """Warn where call after call finds other gradients: little overlaps."""
        if program is not self._program or self._inventory is None:
            return
        pairs = zip(self._inventory.slots, inventory.slots, strict=True)
        changed = [
            new
            for old, new in pairs
            if old.tensor is not new.tensor and old.role is not Role.INPUT
        ]
        if not all(slot.role is Role.GRADIENT for slot in changed):
            return  # a checkpoint was loaded, say
        names = [slot.name for slot in changed]
        program.num_early += 2
        if names and program.num_early >= _TOO_OFTEN:
            program.num_early = -sys.maxsize  # said once
            warnings.warn(
                f"{self._name}: little or nothing overlaps. Call after call has other "
                f"gradients than the call before ({', '.join(names[:2])}; {len(names)} in "
                "all), so that the updates it left are made first. Clear gradients in the "
                "step (optim.zero_grad()), or leave out overlap_iterations.",
                PassWarning,
                stacklevel=3,
            )

    def update(self, inventory: Inventory) -> None:
        """Note the call after which updates will be owed."""
        if self._inventory is None:
            self._watch(inventory)
        self._inventory = inventory

    def flush(self) -> None:
        """Make the updates; once a lost one has been loaded again, forget them."""
        assert self._inventory is not None
        lost = self._find_lost()
        if lost is None:
            self._program.flush(self._inventory)
        else:
            lost.check()
            self._program.drop_owed()
        self.release()

    def before_load(self) -> None:
        """Make the updates, unless one is lost: loading is what helps then."""
        if self._find_lost() is None:
            self._flush()

    def _find_lost(self) -> LostStates | None:
        if self._lost is None:
            assert self._inventory is not None
            self._lost = self._program.find_lost(self._inventory)
        return self._lost

    def settle(self) -> "Pending | None":
        """After a call: itself while anything is owed or lost, else nothing is watched."""
        if self._program.is_pending:
            return self
        self.release()
        return None

    def release(self) -> None:
        """Nothing is owed any more: stop watching."""
        for watched in self._watched:
            watched.remove()
        self._watched.clear()
        self._at_exit.detach()

    def _watch(self, inventory: Inventory) -> None:
        for _, root in inventory.modules:
            for module in root.modules():
                self._watched += [self._watch_method(module, n) for n in _OF_MODULES]
            hook = root.register_forward_pre_hook(_FlushHook(self._flush), prepend=True)
            self._watched.append(_Hook(hook))
        for _, optimizer in inventory.optimizers:
            self._watched += [self._watch_method(optimizer, n) for n in _OF_OPTIMIZERS]

    def _watch_method(self, owner: nn.Module | Optimizer, name: str) -> "_Watched":
        is_load = name == "load_state_dict"
        return _Watched(owner, name, self.before_load if is_load else self._flush)


class _Watched:
    """A method of a user's object that flushes before it runs."""

    def __init__(
        self, owner: nn.Module | Optimizer, name: str, flush: Callable[[], None]
    ) -> None:
        self._owner, self._name, self._flush = owner, name, flush
        self._own = vars(owner).get(name)  # a method that the user put there
        self._method = getattr(owner, name)
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._flush()
        return self._method(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Marks on the method, such as the one that a learning-rate scheduler looks for.
        return getattr(self._method, name)

    def remove(self) -> None:
        if vars(self._owner).get(self._name) is not self:
            return  # somebody wrapped it since; it calls through
        if self._own is None:
            del vars(self._owner)[self._name]
        else:
            vars(self._owner)[self._name] = self._own

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _copied(type(self._owner).__name__)

    def __deepcopy__(self, memo: Any) -> Any:
        raise _copied(type(self._owner).__name__)


class _FlushHook:
    """Flushes before an eager call of the module."""

    belongs_to_compiled_step = True  # no guard of a program

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._flush()

    def __deepcopy__(self, memo: Any) -> Any:
        raise _copied("module")


class _Hook:
    """A hook among the watched methods."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def remove(self) -> None:
        self._handle.remove()


def _copied(owner: str) -> UsageError:
    return UsageError(
        f"The {owner} cannot be copied or pickled while a compiled step owes it an "
        "update: call flush() of the step first, or pass last_train_step=True."
    )


def _report_unflushed(name: str) -> None:
    print(  # noqa: T201
        f"torchspmd: {name} ended with an update that was not made. Pass "
        "last_train_step=True in the last step, call flush(), or use the step as a "
        "context manager.",
        file=sys.stderr,
    )
