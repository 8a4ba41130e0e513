"""Modules and optimizers as an earlier call found them, compared by identity."""

import weakref
from collections.abc import Collection, Mapping
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from torchspmd import _torch
from torchspmd.step.capture.inventory import Number, is_liftable


class ModuleFacts:
    """A module's class, tables and attributes, as they were."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._type = type(module)
        values = vars(module)
        self._keys, self._values = list(values), list(values.values())
        containers = (module._modules, module._parameters, module._buffers)
        self._tables = [(t, list(t), list(t.values())) for t in containers if t]
        hooks = {name: values[name] for name in _torch.HOOK_TABLES}
        # By key: what a hook holds is not held here, and no key is given twice.
        self._hooks = [(name, list(table)) for name, table in hooks.items() if table]
        self._empty = [t for t in (*containers, *hooks.values()) if not t]

    def hold(self) -> bool:
        """Whether all of it is still the same."""
        module = self._module()
        if module is None or type(module) is not self._type:
            return False
        values = vars(module)
        if len(values) != len(self._keys):
            return False
        if not all(map(is_, values.values(), self._values)):
            return False
        return (
            list(values) == self._keys
            and not any(self._empty)
            and all(is_same_table(*table) for table in self._tables)
            and all(list(values[name]) == keys for name, keys in self._hooks)
        )


class OptimizerFacts:
    """An optimizer's groups and states, as they were; numbers of the graph may change."""

    def __init__(self, optimizer: Optimizer, numbers: list[Number]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._type = type(optimizer)
        self._hooks = _hook_keys(optimizer)
        self._groups = optimizer.param_groups
        self._params = [(g, g["params"], list(g["params"])) for g in self._groups]
        lifted = {(id(n.holder), n.key, n.path) for n in numbers}
        self._facts = [
            (group, [_Hyper(group, key, lifted) for key in group if key != "params"])
            for group in self._groups
        ]
        self._state = optimizer.state
        self._entries = [
            (p, e, list(e), list(e.values())) for p, e in self._state.items()
        ]

    def hold(self) -> bool:
        """Whether all of it is still the same."""
        optimizer = self._optimizer()
        if optimizer is None or type(optimizer) is not self._type:
            return False
        if _hook_keys(optimizer) != self._hooks:
            return False
        groups = optimizer.param_groups
        if groups is not self._groups or len(groups) != len(self._params):
            return False
        for group, (old, params, items) in zip(groups, self._params, strict=True):
            if group is not old or group["params"] is not params:
                return False
            if not is_same_items(params, items):
                return False
        if not all(
            len(group) == len(facts) + 1 and all(fact.holds() for fact in facts)
            for group, facts in self._facts
        ):
            return False
        return self._has_same_state(optimizer.state)

    def _has_same_state(self, state: Any) -> bool:
        if state is not self._state or len(state) != len(self._entries):
            return False
        for (parameter, entries), (owner, old, keys, values) in zip(
            state.items(), self._entries, strict=True
        ):
            if parameter is not owner or entries is not old or list(entries) != keys:
                return False
            if not all(map(is_, entries.values(), values)) and not all(
                now is before
                or (type(now) is type(before) and type(now) in (int, float))
                for now, before in zip(entries.values(), values, strict=True)
            ):
                return False
        return True


class ScalerFacts:
    """A gradient scaler's numbers and tensors, as they were."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = weakref.ref(scaler)
        self._facts = _torch.scaler_facts(scaler)
        self._tensors = self._tensors_of(scaler)

    def hold(self) -> bool:
        """Whether all of it is still the same."""
        scaler = self._scaler()
        if scaler is None or _torch.scaler_facts(scaler) != self._facts:
            return False
        return is_same_items(self._tensors_of(scaler), self._tensors)

    @staticmethod
    def _tensors_of(scaler: GradScaler) -> list[torch.Tensor]:
        # It has them already: an earlier call was made with it.
        return list(_torch.scaler_tensors(scaler, torch.device("cpu")).values())


class _Hyper:
    """One entry of a parameter group; items that are inputs of the graph may change."""

    def __init__(
        self, group: dict[str, Any], key: str, lifted: set[tuple[Any, ...]]
    ) -> None:
        self._group, self._key = group, key
        value = group[key]
        items = list(value) if isinstance(value, (tuple, list)) else [value]
        is_flat = not isinstance(value, (tuple, list))
        self._type = type(value)
        self._items = [
            (item, (id(group), key, () if is_flat else (place,)) in lifted)
            for place, item in enumerate(items)
        ]

    def holds(self) -> bool:
        """Whether it is the same, as far as no input of the graph."""
        if self._key not in self._group:
            return False
        value = self._group[self._key]
        if type(value) is not self._type:
            return False
        items = value if isinstance(value, (tuple, list)) else (value,)
        if len(items) != len(self._items):
            return False
        for item, (before, is_lifted) in zip(items, self._items, strict=True):
            if item is before:
                continue
            if type(item) is not type(before) or isinstance(item, torch.Tensor):
                return False
            if not (is_liftable(item) if is_lifted else item == before):
                return False
        return True


def _hook_keys(optimizer: Optimizer) -> list[list[int]]:
    return [list(vars(optimizer)[name]) for name in _torch.OPTIMIZER_HOOK_TABLES]


def is_same_table(table: Mapping[Any, Any], keys: list[Any], values: list[Any]) -> bool:
    """Whether a table holds the same objects under the same keys."""
    return (
        len(table) == len(values)
        and all(map(is_, table.values(), values))
        and all(map(is_, table, keys))
    )


def is_same_vars(
    holder: Any, keys: list[str], values: list[Any], *, kind: type
) -> bool:
    """Whether an object's class and attributes are the same objects."""
    return type(holder) is kind and is_same_table(vars(holder), keys, values)


def is_same_items(now: Collection[Any], before: list[Any]) -> bool:
    """Whether a list, or what can be counted and iterated, holds the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def is_same_bytes(array: Any, before: bytes) -> bool:
    """Whether a NumPy array has the same values."""
    return bool(array.tobytes() == before)
