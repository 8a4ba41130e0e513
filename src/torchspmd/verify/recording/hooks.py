"""Watch every module of a model: what it takes and gives, and their gradients.

Where an input is wrong but no module's output before it, the code of the module around is.

The gradient of an input is that module's own share of it: the input is replaced by an
alias, so that what other readers of the same tensor contribute does not come in.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchspmd import _torch
from torchspmd.verify.recording.files import Key, Kind
from torchspmd.verify.recording.names import plain_name, unwrapped

Keep = Callable[[Key, torch.Tensor], None]


class ModuleHooks:
    """Hooks on a model and its modules, from ``attach`` to ``detach``."""

    def __init__(self, model: nn.Module, keep: Keep) -> None:
        self.notes: list[str] = []
        self.num_calls = 0
        self._model = unwrapped(model)
        self._keep = keep
        self._calls: dict[str, int] = {}
        self._given: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Begin to watch; modules inside a compiled one are left alone."""
        closed: list[str] = []
        seen: set[nn.Module] = set()
        for name, module in self._model.named_modules(remove_duplicate=False):
            if any(name == other or name.startswith(f"{other}.") for other in closed):
                continue
            if _torch.is_compiled_module(module):
                closed.append(name)
                continue
            if module not in seen and not isinstance(
                module, nn.ModuleList | nn.ModuleDict
            ):
                self._attach(plain_name(name), module)
            seen.add(module)
        if closed:
            text = ", ".join(repr(name) for name in closed)
            self.notes.append(
                f"inside {text} nothing is seen: torch.compile runs it as one piece"
            )

    def detach(self) -> None:
        """Leave nothing on any module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def next_step(self) -> None:
        """Number the calls of each module from 0 again."""
        self._calls = {}
        self.num_calls = 0

    def _attach(self, name: str, module: nn.Module) -> None:
        # Ours is outermost on both sides: before and after the hooks of styles and FSDP2.
        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return self._before(name, args, kwargs)

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            return self._after(name, output)

        self._handles += [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def _before(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _is_recomputing():
            return None
        call = self._calls[name] = self._calls.get(name, -1) + 1
        self.num_calls += 1
        leaves, structure = _torch.flatten_tree((args, kwargs))
        given = self._given[name] = {}
        for leaf, value in enumerate(leaves):
            if not isinstance(value, torch.Tensor):
                continue
            self._keep(Key(Kind.INPUT, name, call, leaf), value)
            if value.requires_grad and torch.is_grad_enabled():
                alias = _alias(value)
                self._watch(Key(Kind.GRAD_INPUT, name, call, leaf), alias)
                # One more: hooks that others put on the input come before ours.
                leaves[leaf] = _alias(alias)
                given[id(leaves[leaf])] = (leaves[leaf], value)
        changed: tuple[Any, Any] = _torch.unflatten_tree(leaves, structure)
        return changed

    def _after(self, name: str, output: Any) -> Any:
        if _is_recomputing():
            return None
        call = self._calls.get(name, 0)
        given = self._given.pop(name, {})
        leaves, structure = _torch.flatten_tree(output)
        is_changed = False
        for leaf, found in enumerate(leaves):
            if not isinstance(found, torch.Tensor):
                continue
            # A module that hands its input on: an alias would be a view, which FSDP2 and
            # in-place operators treat otherwise.
            value = given[id(found)][1] if id(found) in given else found
            is_changed = is_changed or value is not found
            leaves[leaf] = value
            self._keep(Key(Kind.FORWARD, name, call, leaf), value)
            if value.requires_grad and value.grad_fn is not None:
                self._watch(Key(Kind.GRAD_OUTPUT, name, call, leaf), value)
        if not any(isinstance(leaf, torch.Tensor | None) for leaf in leaves):
            self._note(
                f"{name or 'the model'!r} returns a {type(output).__name__}, which is not "
                "looked into"
            )
        return _torch.unflatten_tree(leaves, structure) if is_changed else None

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _watch(self, key: Key, value: torch.Tensor) -> None:
        def arrived(gradient: torch.Tensor) -> None:
            self._keep(key, gradient)

        value.register_hook(arrived)


_alias: Callable[[torch.Tensor], torch.Tensor] = torch.ops.aten.alias.default


def _is_recomputing() -> bool:
    """Whether activation checkpointing runs the forward again, inside backward."""
    return _torch.graph_task() != -1
