"""The pending updates of compiled steps, and everything that must not miss them."""

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable

import torch

from torchspmd import _torch
from torchspmd.errors import LostStateError, PassWarning, UsageError
from torchspmd.step.capture.inventory import Inventory, Role, Slot
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.deferral.state import State
from torchspmd.step.flush_hooks import flush_on_access, modules_of
from torchspmd.step.program import Program

# Of a score: a call with other tensors adds two, one that overlaps takes one away.
_TOO_OFTEN = 6


class Pending:
    """The pending updates of one program, from the call that leaves them to their flush.

    Args:
        name: The step.
        program: What leaves them.
        inventory: The call after which updates will be pending; reading its state flushes.
        flush: Flushes the step; a method of it, so that it holds the step's lock.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        inventory: Inventory,
        flush: Callable[[], None],
    ) -> None:
        assert isinstance(program.run, IterGraphModule), type(program.run)
        self._name, self._program, self._run = name, program, program.run
        self.flush_step = flush
        self._inventory = inventory
        self._written = self._find_written(inventory)  # what the updates write
        self._versions = self._read_versions()
        self._lost: LostStates | None = None
        self._at_exit = weakref.finalize(self, _report_unflushed, name)
        self._hooks = flush_on_access(
            inventory,
            self._flush_early,
            self._flush_before_load,
            leaves_gradients=program.leaves_gradients,
        )
        _with_pending.add(self)

    def belongs_to(self, program: Program | None, inventory: Inventory) -> bool:
        """Whether a call can make the updates: the same program on the same tensors.

        Not after an exception that came when some were made: the others go first.
        """
        if program is not self._program or self._run.state is not State.PENDING:
            return False
        return not self._replaced(inventory)

    def note_other_tensors(self, program: Program | None, inventory: Inventory) -> None:
        """Warn where call after call finds other gradients: little overlaps."""
        if program is not self._program:
            return
        replaced = self._replaced(inventory)
        if not replaced or any(slot.role is not Role.GRADIENT for slot in replaced):
            return  # an exception ended the call before, or a checkpoint was loaded
        names = [slot.name for slot in replaced]
        self._count_early(
            "Call after call has other gradients than the call before "
            f"({', '.join(names[:2])}; {len(names)} in all), so that the updates it left "
            "are made first. Clear gradients in the step (optim.zero_grad()), or compile "
            "it with overlap=False."
        )

    def _replaced(self, inventory: Inventory) -> list[Slot]:
        """The tensors of a call, other than its arguments, that the call before had not."""
        pairs = zip(self._inventory.slots, inventory.slots, strict=True)
        return [
            new
            for old, new in pairs
            if old.tensor is not new.tensor and old.role is not Role.INPUT
        ]

    def _flush_early(self) -> None:
        """Make the updates because state is read before the next call could make them."""
        self.flush_step()
        self._count_early(
            "Again and again the model or the optimizer is read between two steps (here, "
            "for one), so that the updates are made first. Read them less often, or "
            "compile the step with overlap=False."
        )

    def _count_early(self, why: str) -> None:
        self._program.num_early += 2
        if self._program.num_early >= _TOO_OFTEN:
            self._program.num_early = -sys.maxsize  # said once
            text = f"{self._name}: little or nothing overlaps. {why}"
            warnings.warn(text, PassWarning, stacklevel=4)

    def update(self, inventory: Inventory) -> None:
        """The next call is made, after which updates will be pending again."""
        self._check_unwritten()
        if inventory is not self._inventory:
            before, self._written = self._written, self._find_written(inventory)
            if not _are_same(before, self._written):
                self._versions = self._read_versions()
        self._inventory = inventory

    def _find_written(self, inventory: Inventory) -> list[tuple[str, torch.Tensor]]:
        count, slots = len(inventory.slots), inventory.slots
        return [
            (slots[n].name, _torch.plain_tensor(slots[n].tensor))
            for n in self._run.deferred_states
            if n < count
        ]

    def flush(self) -> None:
        """Make the updates; once a lost one has been loaded again, forget them."""
        if self._lost is None:
            self._check_unwritten()
            try:
                self._program.flush(self._inventory)
            except BaseException:
                self._look_at_states()  # some may be made
                raise
        else:
            self._lost.check()
            self._run.drop_pending()
        self.release()

    def _flush_before_load(self) -> None:
        """Make the updates, unless one is lost: loading is what helps then."""
        if self._lost is None:
            self._flush_early()

    def settle(self) -> "Pending | None":
        """After a call: itself while anything is pending or lost, else None."""
        if self._run.is_pending:
            self._look_at_states()
            return self
        self.release()
        return None

    def _look_at_states(self) -> None:
        """Note what the states are now, so that it shows when others write to them."""
        self._versions = self._read_versions()
        if self._run.state.is_lost:
            self._lost = LostStates(self._inventory, self._run.lost)

    def writes_to(self, inventory: Inventory) -> bool:
        """Whether the updates write into a tensor of a call."""
        used = {_torch.storage_key(slot.tensor) for slot in inventory.slots}
        return any(_torch.storage_key(tensor) in used for _, tensor in self._written)

    def shares_modules(self, inventory: Inventory) -> bool:
        """Whether a module of a call would flush the updates."""
        return not modules_of(self._inventory).keys().isdisjoint(modules_of(inventory))

    def release(self) -> None:
        """Nothing is pending any more: remove the hooks."""
        self._hooks.close()
        _with_pending.discard(self)
        self._at_exit.detach()

    def _check_unwritten(self) -> None:
        """Raise, once, where the user wrote into what a pending update writes."""
        before, self._versions = self._versions, self._read_versions()
        changes = zip(self._written, before, self._versions, strict=True)
        names = [name for (name, _), old, new in changes if old != new]
        if names:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            raise UsageError(
                f"{self._name}: {', '.join(names[:2])}{more} changed since the last step, "
                "which still has a pending update of them. It would be made on top of the "
                "new values, not before them.\n\nCall flush() of the step before you write "
                "to weights or optimizer states between steps (model.parameters() and "
                "state_dict() call it themselves), or compile it with overlap=False. To go "
                "on with the update on top, call flush() now."
            )

    def _read_versions(self) -> list[tuple[int, int]]:
        """How often each tensor was written, and where it lies: `p.data = ...` moves it."""
        return [
            (_torch.version_of(tensor), tensor.data_ptr())
            for _, tensor in self._written
        ]


def _are_same(
    one: list[tuple[str, torch.Tensor]], other: list[tuple[str, torch.Tensor]]
) -> bool:
    return len(one) == len(other) and all(
        old is new for (_, old), (_, new) in zip(one, other, strict=True)
    )


# What is pending in this process: another step may use the same tensors.
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
    """What a call may leave, also by an exception; reading state flushes it from now on."""
    if pending is not None:
        pending.update(inventory)
    elif program.is_deferring and not last:
        pending = Pending(name, program, inventory, flush)
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
    """Flush other steps that write to the tensors of a call; whether there were any."""
    others = [each for each in _with_pending if each is not own]
    found = [each for each in others if each.writes_to(inventory)]
    for each in found:
        each.flush_step()
    return bool(found)


def flush_shared(inventory: Inventory) -> None:
    """Flush the steps that a module of this call would flush within its capture."""
    for each in [each for each in _with_pending if each.shares_modules(inventory)]:
        each.flush_step()


def forget_pending() -> None:
    """Nothing is pending any more in this process: what ran was no training."""
    for each in list(_with_pending):
        each.release()


def _report_unflushed(name: str) -> None:
    print(  # noqa: T201
        f"torchspmd: {name} ended with an update that was not made. Pass "
        "last_train_step=True in the last step, call flush(), or use the step as a "
        "context manager.",
        file=sys.stderr,
    )


class LostStates:
    """States that an exception left half written, until they have other values.

    A tensor has another value once it was written, as by ``nn.Module.load_state_dict``,
    or once another tensor is in its place, as after ``Optimizer.load_state_dict``. A
    counter that is a Python number has one once the optimizer keeps it somewhere else.

    Args:
        inventory: Where the tensors and numbers are.
        states: Their places among the graph's inputs: tensors, then numbers.
    """

    def __init__(self, inventory: Inventory, states: Iterable[int]) -> None:
        self._inventory = inventory
        places, count = list(states), len(inventory.slots)
        self._versions = {n: self._version(n) for n in places if n < count}
        self._numbers = [inventory.numbers[n - count] for n in places if n >= count]

    def check(self) -> None:
        """Raise unless all of them have got other values."""
        replaced = self._find_replaced()
        lost = [
            self._inventory.slots[slot].name
            for slot, version in self._versions.items()
            if slot not in replaced and self._version(slot) == version
        ]
        holders = {
            id(entries)
            for _, optimizer in self._inventory.optimizers
            for entries in optimizer.state.values()
        }
        lost += [each.name for each in self._numbers if id(each.holder) in holders]
        if lost:
            raise LostStateError.of(lost)

    def _version(self, slot: int) -> int:
        tensor = self._inventory.slots[slot].tensor
        return _torch.version_of(_torch.plain_tensor(tensor))

    def _find_replaced(self) -> set[int]:
        """The slots whose tensor is in none of its places any more."""
        inventory = self._inventory
        found: list[tuple[int, torch.Tensor | None]] = [
            (place.slot, place.table.get(place.key)) for place in inventory.places
        ]
        for state in inventory.states:
            _, optimizer = inventory.optimizers[state.optimizer]
            owner = inventory.slots[state.parameter].tensor
            found.append((state.slot, optimizer.state.get(owner, {}).get(state.key)))
        for parameter, slot in inventory.gradients.items():
            found.append((slot, inventory.slots[parameter].tensor.grad))
        held = {slot for slot, now in found if now is inventory.slots[slot].tensor}
        return {slot for slot, _ in found} - held
