"""The user's own modules and optimizers with traced values in place of their tensors.

While a step is traced its objects hold what the trace gives them; afterwards everything
is put back, whatever happened.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.errors import CaptureError
from torchspmd.step.capture.guards import name_of_hook
from torchspmd.step.capture.host_values import HostValues
from torchspmd.step.capture.inventory import Inventory, Number, Role
from torchspmd.step.capture.rank_divergence import (
    keep_inner,
    mark_gradient,
    refuse_graphs,
)
from torchspmd.step.capture.refusals import (
    calling_line,
    check_first_step,
    check_whole,
    is_spread,
)
from torchspmd.step.capture.spread import Spread
from torchspmd.step.graph.metadata import OwnerLog

# ----------------------------------------------------------------------------
# Hooks that the user put on the gradients of parameters, run while a step is traced.
#
# They work on the traced tensor that stands for a parameter, so that autograd calls them
# where it would call them in eager, and what they compute becomes part of the graph.


def install_gradient_hooks(
    inventory: Inventory, shown: list[torch.Tensor], log: OwnerLog
) -> Iterator[Any]:
    """Give the traced parameters the hooks of the user's; gives the handles.

    Behind all hooks of ours: a hook gets the gradient that ``grad`` gets.
    """
    _check(inventory)
    for slot, traced in zip(inventory.slots, shown, strict=True):
        if slot.role is not Role.PARAMETER or not traced.requires_grad:
            continue
        owner = slot.name.rpartition(".")[0]
        for table, _, hook in _hooks_of(slot.tensor):
            yield _torch.add_gradient_hook(traced, table, _Owned(hook, log, owner))


def _hooks_of(tensor: torch.Tensor) -> Iterator[tuple[str, int, Any]]:
    return _torch.hooks_of(tensor, _torch.GRADIENT_HOOK_TABLES)


def _check(inventory: Inventory) -> None:
    """Refuse hooks that would never be called on other tensors than their own."""
    lines = [
        f"  * {slot.name}: {name_of_hook(hook)}"
        for slot in inventory.slots
        if slot.role is Role.PARAMETER
        for _, _, hook in _hooks_of(slot.tensor)
        if _torch.waits_for_nodes(hook)
    ]
    if lines:
        raise CaptureError(
            "compile: parameters have gradient hooks of register_multi_grad_hook("
            'mode="all"), which wait for all gradients of one backward and cannot be '
            "captured:\n\n" + "\n".join(lines) + "\n\nRemove them, and do what they do "
            "in the step, after backward."
        )


class _Owned:
    """A hook whose operators belong to the module of its parameter."""

    def __init__(self, hook: Any, log: OwnerLog, owner: str) -> None:
        self._hook, self._log, self._owner = hook, log, owner

    def __call__(self, tensor: torch.Tensor) -> Any:
        with self._log.owned(Phase.BACKWARD, self._owner):
            return self._hook(tensor)


# Optimizers whose update of an element depends on that element's own values alone: on a
# shard they do what they would do on the whole tensor.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.RAdam,
    torch.optim.ASGD,
)


class Stage:
    """Traced values for one inventory, and the objects that hold them.

    Attributes:
        locals: The traced tensor of each slot; the optimizer writes into it.
        shown: What the user's modules see for each slot.
        handed: The parameters that a running optimizer was handed as plain tensors.
        running: The optimizers that are in their step, inner ones last.
        arrived: The parameters whose gradient backward has made, cleared since or not.
        fresh: The parameters whose gradient was cleared before that.
        stepped: The parameters that an optimizer of the step has updated.
    """

    def __init__(
        self, inventory: Inventory, flat: tuple[Any, ...], spread: Spread
    ) -> None:
        self.inventory = inventory
        count = len(inventory.slots)
        self.locals: list[torch.Tensor] = list(flat[:count])
        self.numbers: list[Any] = list(flat[count:])
        self.spread = spread
        self.handed: set[int] = set()
        self.running: list[_OptimizerRun] = []
        self.arrived: set[int] = set()
        self.fresh: set[int] = set()
        self.stepped: set[int] = set()
        self._plain = self._plain_slots()
        self.shown = [
            spread.show(slot, local)
            for slot, local in zip(inventory.slots, self.locals, strict=True)
        ]
        for slot, shown in zip(inventory.slots, self.shown, strict=True):
            if slot.tensor.requires_grad:
                shown.requires_grad_()
        for index, _, slots in inventory.groups:
            parts = [inventory.slots[slot] for slot in slots]
            sharded = [part.name for part in parts if is_spread(part.tensor)]
            check_whole(inventory.optimizers[index][1], sharded)
        for parameter, gradient in inventory.gradients.items():
            self.shown[parameter].grad = self.shown[gradient]

    def leaves(self) -> list[Any]:
        """The step's arguments with traced tensors and numbers."""
        leaves = list(self.inventory.leaves)
        for place, slot in self.inventory.inputs.items():
            leaves[place] = self.shown[slot]
        for number, traced in zip(self.inventory.numbers, self.numbers, strict=True):
            if number.leaf >= 0:
                leaves[number.leaf] = traced
        return leaves

    def steps_on(self, slot: int) -> torch.Tensor:
        """What an optimizer works on for a parameter or a state.

        Where the mode laid out a plain tensor as replicated, the plain one: every
        optimizer works on it, whether DTensor knows its operators or not. Of a DTensor,
        the shard, for optimizers that treat each element by itself.
        """
        return self.locals[slot] if slot in self._plain else self.shown[slot]

    def _plain_slots(self) -> set[int]:
        inventory = self.inventory
        plain = {
            place
            for place, slot in enumerate(inventory.slots)
            if _torch.layout_of(slot.tensor) is None
        }
        elementwise = {
            index
            for index, (_, optimizer) in enumerate(inventory.optimizers)
            if type(optimizer) in ELEMENTWISE
        }
        for index, _, slots in inventory.groups:
            if index in elementwise:
                plain.update(slots)
        plain.update(s.slot for s in inventory.states if s.optimizer in elementwise)
        return plain

    @contextlib.contextmanager
    def installed(
        self, log: OwnerLog, world: _torch.FakeWorld, values: HostValues
    ) -> Iterator[None]:
        """Put the traced values into the user's objects; put all back at the end."""
        with contextlib.ExitStack() as stack:
            for place in self.inventory.places:
                stack.callback(
                    place.table.__setitem__, place.key, place.table[place.key]
                )
                place.table[place.key] = self._held(place.slot)
            self._install_numbers(stack)
            for index, (_, optimizer) in enumerate(self.inventory.optimizers):
                run = _OptimizerRun(self, index, log, world, values)
                self._install_optimizer(stack, index, optimizer, run)
            known = [id(optimizer) for _, optimizer in self.inventory.optimizers]
            guard = _KnownOptimizers(frozenset(known), self.inventory)
            stack.callback(register_optimizer_step_pre_hook(guard).remove)
            self._install_reduction(stack, log)
            stack.enter_context(self.spread.installed(self.inventory, self.shown, log))
            for hook in install_gradient_hooks(self.inventory, self.shown, log):
                stack.callback(hook.remove)
            yield

    def _held(self, slot: int) -> torch.Tensor:
        is_hyper = self.inventory.slots[slot].role is Role.HYPER
        return self.locals[slot] if is_hyper else self.shown[slot]

    def _install_numbers(self, stack: contextlib.ExitStack) -> None:
        for number, traced in zip(self.inventory.numbers, self.numbers, strict=True):
            if number.holder is not None and not number.is_state:
                stack.callback(
                    number.holder.__setitem__, number.key, number.holder[number.key]
                )
                number.holder[number.key] = _placed(number, traced)

    def _install_reduction(self, stack: contextlib.ExitStack, log: OwnerLog) -> None:
        for place, slot in enumerate(self.inventory.slots):
            shown = self.shown[place]
            if slot.role is Role.PARAMETER and shown.requires_grad:
                # Before it is added to `grad`: what is there was reduced already.
                hook = shown.register_hook(_Reduction(self, log, place))
                stack.callback(hook.remove)
                if self.spread.reduces:
                    stack.callback(refuse_graphs(shown, slot.name))

    def _install_optimizer(
        self,
        stack: contextlib.ExitStack,
        index: int,
        optimizer: Optimizer,
        run: "_OptimizerRun",
    ) -> None:
        stack.callback(setattr, optimizer, "state", optimizer.state)
        for owner, number, slots in self.inventory.groups:
            if owner == index:
                group = optimizer.param_groups[number]
                stack.callback(group.__setitem__, "params", group["params"])
                group["params"] = [self.shown[slot] for slot in slots]
        optimizer.state = self._traced_state(index)
        for hook in (
            optimizer.register_step_pre_hook(run.begin),
            optimizer.register_step_post_hook(run.end),
        ):
            stack.callback(hook.remove)
        stack.callback(run.abort)

    def _traced_state(self, index: int) -> defaultdict[torch.Tensor, Any]:
        """An optimizer's state, keyed by what it steps on."""
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        optimizer = self.inventory.optimizers[index][1]
        traced = {
            (place.parameter, place.key): self.steps_on(place.slot)
            for place in self.inventory.states
            if place.optimizer == index
        }
        numbers = {
            (id(number.holder), number.key): value
            for number, value in zip(self.inventory.numbers, self.numbers, strict=True)
            if number.is_state
        }
        for parameter, entries in optimizer.state.items():
            slot = self.inventory.by_id[id(parameter)]
            state[self.steps_on(slot)] = {
                key: traced.get((slot, key), numbers.get((id(entries), key), value))
                for key, value in entries.items()
            }
        return state


class _KnownOptimizers:
    """Refuses the step of an optimizer that has the user's parameters, without gradients.

    A hook or a closure can hold one that is no argument; it would update nothing.
    """

    def __init__(self, known: frozenset[int], inventory: Inventory) -> None:
        self._known, self._inventory = known, inventory

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._known:
            return
        by_id, slots = self._inventory.by_id, self._inventory.slots
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in by_id:
                    raise CaptureError(
                        f"compile: the step, or a hook, calls step() of an optimizer "
                        f"({type(optimizer).__name__}) that is no argument of the step, "
                        f"so {slots[by_id[id(parameter)]].name} would not be updated. "
                        "Pass every optimizer that steps as an argument."
                    )


class _Reduction:
    """Reduces a parameter's gradient as soon as backward has made it."""

    def __init__(self, stage: Stage, log: OwnerLog, place: int) -> None:
        self._stage, self._spread, self._log = stage, stage.spread, log
        self._place, self._name = place, stage.inventory.slots[place].name
        self._owner = self._name.rpartition(".")[0]

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self._stage.arrived.add(self._place)
        if self._place in self._stage.handed:
            raise CaptureError(
                f"compile: an optimizer's step() runs backward itself, after it was handed "
                f"the gradient of {self._name}\n\n  * {calling_line()}\n\nCall backward "
                "before step(), or pass step() a closure that does."
            )
        with self._log.owned(Phase.BACKWARD, self._owner):
            if self._spread.reduces and torch.is_grad_enabled():
                return keep_inner(gradient)  # create_graph=True
            with torch.no_grad():
                reduced = self._spread.reduce(gradient)
                mark_gradient(reduced, self._stage.shown[self._place], self._place)
            return reduced


class _OptimizerRun:
    """Hands an optimizer the plain tensors while it steps, and lets it read counters."""

    def __init__(
        self,
        stage: Stage,
        index: int,
        log: OwnerLog,
        world: _torch.FakeWorld,
        values: HostValues,
    ) -> None:
        self._stage, self._index = stage, index
        self._log, self._world, self._values = log, world, values
        self._open: contextlib.ExitStack | None = None
        self._depth = 0

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > 1:  # a step that calls super().step() has hooks twice
            return None
        check_first_step(optimizer)
        self._enter()
        args = (*args[:1], *map(self._outside, args[1:]))
        return args, {key: self._outside(value) for key, value in kwargs.items()}

    def _outside(self, argument: Any) -> Any:
        """A closure that runs as if no optimizer were in its step."""
        if not callable(argument):
            return argument

        @functools.wraps(argument)
        def closure(*args: Any, **kwargs: Any) -> Any:
            paused = list(self._stage.running)
            for run in reversed(paused):
                run._close()
            try:
                return argument(*args, **kwargs)
            finally:
                for run in paused:  # with the gradients that backward made
                    run._enter()

        return closure

    def _enter(self) -> None:
        stack = self._open = contextlib.ExitStack()
        stack.enter_context(self._log.owned(Phase.OPTIMIZER))
        stack.enter_context(self._world.reading_values())
        stack.enter_context(_torch.numbers.extremes_in_graph())
        stack.enter_context(self._values)
        stage = self._stage
        stage.running.append(self)
        stack.callback(stage.running.remove, self)
        optimizer = stage.inventory.optimizers[self._index][1]
        for owner, number, slots in stage.inventory.groups:
            if owner != self._index:
                continue
            group = optimizer.param_groups[number]
            stack.callback(group.__setitem__, "params", group["params"])
            group["params"] = [stage.steps_on(slot) for slot in slots]
            stage.stepped.update(slots)
            for slot in slots:
                self._hand_over(slot, stack)

    def _hand_over(self, slot: int, stack: contextlib.ExitStack) -> None:
        shown, plain = self._stage.shown[slot], self._stage.steps_on(slot)
        # An optimizer that steps another one has the gradient, and may have changed it.
        if shown is plain or slot in self._stage.handed:
            return
        self._stage.handed.add(slot)
        stack.callback(self._stage.handed.discard, slot)
        with torch.no_grad():
            plain.grad = self._stage.spread.for_optimizer(shown)
        stack.callback(_take_back, shown, plain, plain.grad)

    def end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.abort()

    def abort(self) -> None:
        self._depth = 0
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _take_back(
    shown: torch.Tensor, plain: torch.Tensor, handed: torch.Tensor | None
) -> None:
    """Give a parameter the gradient that its optimizer put in place of the one it had."""
    made = plain.grad
    if made is not handed:
        layout = _torch.layout_of(shown)
        shown.grad = None if made is None else _torch.wrap_local(made, layout)


def _placed(number: Number, traced: Any) -> Any:
    """A hyper-parameter with one of its items traced; other items as they are now."""
    assert number.holder is not None
    if not number.path:
        return traced
    items = list(number.holder[number.key])
    items[number.path[0]] = traced
    return type(number.holder[number.key])(items)
