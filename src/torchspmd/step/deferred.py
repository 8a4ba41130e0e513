"""Updates that a step left for the next one, and everything that must not miss them."""

import sys
import warnings
import weakref
from collections.abc import Callable

import torch

from torchspmd import _torch
from torchspmd.errors import PassWarning, UsageError
from torchspmd.step.capture.inventory import Inventory, Role
from torchspmd.step.flush_hooks import Hook, Refused, Watched, modules_of, watch
from torchspmd.step.program import LostStates, Program

# Of a score: a call with other tensors adds two, one that overlaps takes one away.
_TOO_OFTEN = 6


class Pending:
    """The pending updates of one program, until it is flushed."""

    def __init__(self, name: str, program: Program, flush: Callable[[], None]) -> None:
        self._name, self._program = name, program
        self._flush = flush
        self._inventory: Inventory | None = None
        self._watched: list[Watched | Hook | Refused] = []
        self._pending: list[tuple[str, torch.Tensor]] = []  # what it will write
        self._versions: list[int] = []
        self._lost: LostStates | None = None
        self._at_exit = weakref.finalize(self, _report_unflushed, name)

    def belongs_to(self, program: Program | None, inventory: Inventory) -> bool:
        """Whether a call can do what is pending: the same program on the same tensors.

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
        if not changed:
            return  # an exception ended the call before
        if not all(slot.role is Role.GRADIENT for slot in changed):
            return  # a checkpoint was loaded, say
        names = [slot.name for slot in changed]
        self._count_early(
            "Call after call has other gradients than the call before "
            f"({', '.join(names[:2])}; {len(names)} in all), so that the updates it left "
            "are made first. Clear gradients in the step (optim.zero_grad()), or leave out "
            "overlap_iterations."
        )

    def _flush_early(self) -> None:
        """Make the updates because somebody looks, before the next call could."""
        self._flush()
        self._count_early(
            "Again and again something looks at the model or the optimizer between two "
            "steps (here, for one), so that the updates are made first. Look less often, "
            "or leave out overlap_iterations."
        )

    def _count_early(self, why: str) -> None:
        self._program.num_early += 2
        if self._program.num_early >= _TOO_OFTEN:
            self._program.num_early = -sys.maxsize  # said once
            text = f"{self._name}: little or nothing overlaps. {why}"
            warnings.warn(text, PassWarning, stacklevel=4)

    def update(self, inventory: Inventory) -> None:
        """Note the call after which updates will be pending."""
        if self._inventory is None:
            self._watched = watch(
                inventory,
                self._flush_early,
                self.before_load,
                pending_gradients=self._program.leaves_gradients,
            )
            _with_pending.add(self)
        else:
            self._check_unwritten()
        if inventory is not self._inventory:
            self._pending = self._program.pending_states(inventory)
            self._versions = self._read_versions()
        self._inventory = inventory

    def flush(self) -> None:
        """Make the updates; once a lost one has been loaded again, forget them."""
        assert self._inventory is not None
        lost = self._find_lost()
        if lost is None:
            self._check_unwritten()
            try:
                self._program.flush(self._inventory)
            except BaseException:
                self._versions = self._read_versions()  # some may be made
                raise
        else:
            lost.check()
            self._program.drop_pending()
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
        """After a call: itself while anything is pending or lost, else None."""
        if self._program.is_pending:
            self._versions = self._read_versions()
            return self
        self.release()
        return None

    def is_about(self, inventory: Inventory) -> bool:
        """Whether it will write into a tensor of a call."""
        used = {_torch.storage_key(slot.tensor) for slot in inventory.slots}
        return any(_torch.storage_key(tensor) in used for _, tensor in self._pending)

    def watches(self, inventory: Inventory) -> bool:
        """Whether a module of a call would have it flush."""
        assert self._inventory is not None
        return not modules_of(self._inventory).keys().isdisjoint(modules_of(inventory))

    def demand(self) -> None:
        """Have the step that left it make it."""
        self._flush()

    def release(self) -> None:
        """Nothing is pending any more: stop watching."""
        for watched in self._watched:
            watched.remove()
        self._watched.clear()
        _with_pending.discard(self)
        self._at_exit.detach()

    def _check_unwritten(self) -> None:
        """Raise, once, where the user wrote into what a pending update writes."""
        versions = self._read_versions()
        written = [
            name
            for (name, _), before, now in zip(
                self._pending, self._versions, versions, strict=True
            )
            if before != now
        ]
        self._versions = versions
        if written:
            raise UsageError(_written(self._name, written))

    def _read_versions(self) -> list[int]:
        return [_torch.version_of(tensor) for _, tensor in self._pending]


# What is pending in this process: another step may be about the same tensors.
_with_pending: weakref.WeakSet[Pending] = weakref.WeakSet()


def expected(
    pending: Pending | None,
    name: str,
    program: Program,
    inventory: Inventory,
    flush: Callable[[], None],
    *,
    last: bool,
) -> Pending | None:
    """What a call may leave, by an exception too; it is watched from now on."""
    if pending is None and program.is_deferring and not last:
        pending = Pending(name, program, flush)
    if pending is not None:
        pending.update(inventory)
    return pending


def flush_last(name: str, flush: Callable[[], None]) -> None:
    """Make what the last step leaves; who sees it fail must not make the step again."""
    try:
        flush()
    except BaseException as error:
        error.add_note(
            f"{name}: the last step was made, but not all of its updates. Call flush() for "
            "the rest; do not run the step again."
        )
        raise


def flush_others(inventory: Inventory, own: Pending | None) -> bool:
    """Make what other steps owe to the tensors of a call; whether there was anything."""
    others = [each for each in _with_pending if each is not own]
    if not others:
        return False
    found = [each for each in others if each.is_about(inventory)]
    for each in found:
        each.demand()
    return bool(found)


def flush_watching(inventory: Inventory) -> None:
    """Make what would be made within a capture, by a module that steps share."""
    for each in [each for each in _with_pending if each.watches(inventory)]:
        each.demand()


def _written(name: str, written: list[str]) -> str:
    more = f" and {len(written) - 2} more" if len(written) > 2 else ""
    return (
        f"{name}: {', '.join(written[:2])}{more} changed since the last step, which still "
        "has a pending update of them. It would be made on top of the new values, not "
        "before them.\n\nCall flush() of the step before you write to weights or optimizer "
        "states between steps (model.parameters() and state_dict() call it themselves), "
        "or leave out overlap_iterations. To go on with the update on top, call flush() "
        "now."
    )


def _report_unflushed(name: str) -> None:
    print(  # noqa: T201
        f"torchspmd: {name} ended with an update that was not made. Pass "
        "last_train_step=True in the last step, call flush(), or use the step as a "
        "context manager.",
        file=sys.stderr,
    )
