"""Stand-ins for modules while a step is captured, and edits of the graph they leave."""

import contextlib
import difflib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from torchspmd import _torch
from torchspmd.errors import CaptureError, UsageError

Selection: TypeAlias = str | type[nn.Module] | Callable[[str, nn.Module], bool]


class Override:
    """Replaces modules while a step is captured; the user's own modules stay as they are.

    Subclass it, choose modules with ``select`` and write ``replacement``, ``transform`` or
    both. A stand-in usually calls a custom operator, by which ``transform`` finds its place
    in the graph, or computes the same in another way on the original's parameters.

    Args:
        select: Which modules are offered: a pattern on their names (``blocks.*.mlp``), a
            type, or a function of name and module; all by default. A selection that
            matches nothing is an error.

    Example:
        >>> class Twice(nn.Module):
        ...     def __init__(self, inner):
        ...         super().__init__()
        ...         self.inner = inner
        ...     def forward(self, x):
        ...         return 2 * self.inner(x)
        >>> class Double(Override):
        ...     def replacement(self, fqn, orig_submodule):
        ...         return Twice(orig_submodule)
        >>> from torchspmd.step import compile
        >>> @compile(module_override=[Double(select="0")])
        ... def step(model, batch):
        ...     return model(batch)
        >>> step(nn.Sequential(nn.Identity()), torch.ones(1)).tolist()
        [2.0]
    """

    def __init__(self, select: Selection | None = None) -> None:
        self.select = select

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        """The stand-in for a module, or the module itself to look at its children.

        Args:
            fqn: The module's name inside the model; empty for the model itself.
            orig_submodule: The module.
        """
        return orig_submodule

    def transform(
        self, gm: fx.GraphModule, flat_state: list[torch.Tensor]
    ) -> fx.GraphModule:
        """The captured graph, edited.

        Args:
            gm: The functional graph; its inputs and outputs must stay the same.
            flat_state: The tensors that feed its first inputs, in order.
        """
        return gm

    def selects(self, fqn: str, module: nn.Module) -> bool:
        """Whether a module is offered."""
        select = self.select
        if select is None:
            return True
        if isinstance(select, str):
            return fnmatchcase(fqn, select)
        if isinstance(select, type):
            return isinstance(module, select)
        return bool(select(fqn, module))


@dataclass(frozen=True, slots=True)
class _Swap:
    """One place in a module tree, what is there, and what stands in for it."""

    parent: weakref.ref[nn.Module] | None  # None: the model itself
    name: str
    original: nn.Module
    stand_in: nn.Module

    def table(self) -> dict[str, nn.Module | None] | None:
        """Where the parent keeps its children."""
        parent = None if self.parent is None else self.parent()
        return None if parent is None else parent._modules


class Overrides:
    """All overrides of a compiled step, asked once for each module."""

    def __init__(self, overrides: Sequence[Override]) -> None:
        if not isinstance(overrides, Sequence):
            raise UsageError(
                f"compile(module_override=...): {type(overrides).__name__} is no list. "
                "Pass a list of objects of subclasses of torchspmd.step.Override."
            )
        for each in overrides:
            if not isinstance(each, Override):
                raise UsageError(
                    f"compile(module_override=...): {type(each).__name__} is no Override. "
                    "Pass a list of objects of subclasses of torchspmd.step.Override."
                )
        self._overrides = tuple(overrides)
        self._swaps: weakref.WeakKeyDictionary[nn.Module, tuple[_Swap, ...]] = (
            weakref.WeakKeyDictionary()
        )

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._overrides)

    @contextlib.contextmanager
    def standing_in(self, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Put the stand-ins into the models among some arguments; take them out again.

        Gives the arguments, with stand-ins for whole models.
        """
        if not self._overrides:
            yield args, kwargs
            return
        leaves, structure = _torch.flatten_tree((args, kwargs))
        with contextlib.ExitStack() as stack:
            for place, leaf in enumerate(leaves):
                for swap in self._of(leaf) if isinstance(leaf, nn.Module) else ():
                    if swap.parent is None:
                        leaves[place] = swap.stand_in
                    else:
                        _put(stack, swap)
            yield _torch.unflatten_tree(leaves, structure)

    def transform(
        self, gm: fx.GraphModule, flat_state: list[torch.Tensor]
    ) -> fx.GraphModule:
        """Let each override edit the graph, and check that it kept inputs and outputs."""
        for override in self._overrides:
            before = _interface(gm)
            gm = override.transform(gm, flat_state)
            name = type(override).__name__
            if not isinstance(gm, fx.GraphModule):
                raise CaptureError(
                    f"{name}.transform returned {type(gm).__name__}. Return the "
                    "fx.GraphModule that it was given, edited."
                )
            if _interface(gm) != before:
                raise CaptureError(
                    f"{name}.transform changed the graph's inputs or the number of its "
                    f"outputs: {before} -> {_interface(gm)}. A compiled step binds them by "
                    "place: edit only what is between them."
                )
            gm.graph.lint()
            gm.recompile()
        return gm

    def _of(self, root: nn.Module) -> tuple[_Swap, ...]:
        known = self._swaps.get(root)
        if known is None or not all(map(_still_there, known)):
            known = self._swaps[root] = self._ask(root)
        return known

    def _ask(self, root: nn.Module) -> tuple[_Swap, ...]:
        """Offer every module of a model once to each override that selects it."""
        swaps: list[_Swap] = []
        offered: dict[int, set[str]] = {}
        chosen: dict[nn.Module, nn.Module] = {}

        def visit(
            parent: nn.Module | None, name: str, fqn: str, module: nn.Module
        ) -> None:
            if module not in chosen:
                chosen[module] = self._choose(fqn, module, offered)
                if chosen[module] is module:
                    for key, child in module.named_children():
                        visit(module, key, f"{fqn}.{key}" if fqn else key, child)
            if chosen[module] is not module:
                place = None if parent is None else weakref.ref(parent)
                swaps.append(_Swap(place, name, module, chosen[module]))

        visit(None, "", "", root)
        self._check_selections(root, offered)
        return tuple(swaps)

    def _choose(
        self, fqn: str, module: nn.Module, offered: dict[int, set[str]]
    ) -> nn.Module:
        for place, override in enumerate(self._overrides):
            if not override.selects(fqn, module):
                continue
            offered.setdefault(place, set()).add(fqn)
            stand_in = override.replacement(fqn, module)
            if not isinstance(stand_in, nn.Module):
                raise UsageError(
                    f"{type(override).__name__}.replacement({fqn!r}) returned "
                    f"{type(stand_in).__name__}. Return a module: a stand-in, or the "
                    "one that it was given."
                )
            if stand_in is not module:
                return stand_in
        return module

    def _check_selections(self, root: nn.Module, offered: dict[int, set[str]]) -> None:
        names = [name for name, _ in root.named_modules()]
        for place, override in enumerate(self._overrides):
            if offered.get(place) or override.select is None:
                continue
            wanted = str(override.select)
            close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
            hint = f" Did you mean {', '.join(close)}?" if close else ""
            raise UsageError(
                f"compile(module_override=...): {type(override).__name__} selects "
                f"{override.select!r}, which matches no module of "
                f"{type(root).__name__}, or only modules inside one that another override "
                f"replaced.{hint}"
            )


def _put(stack: contextlib.ExitStack, swap: _Swap) -> None:
    table = swap.table()
    assert table is not None
    stack.callback(table.__setitem__, swap.name, swap.original)
    table[swap.name] = swap.stand_in


def _still_there(swap: _Swap) -> bool:
    if swap.parent is None:
        return True
    table = swap.table()
    return table is not None and table.get(swap.name) is swap.original


def _interface(gm: fx.GraphModule) -> tuple[tuple[str, ...], int]:
    names = tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))
    (values,) = gm.graph.output_node().args
    return names, len(values) if isinstance(values, (list, tuple)) else 1
