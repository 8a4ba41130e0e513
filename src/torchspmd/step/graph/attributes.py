"""Everything that a module and its submodules hold by name, to put back after a failure."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

_CONTAINERS = (dict, OrderedDict, set, list)


@dataclass(frozen=True, slots=True)
class _Held:
    """What one module holds, and what its own containers hold.

    Parameters, buffers and submodules lie in such containers, by name.
    """

    module: nn.Module
    values: Mapping[str, Any]
    contents: Mapping[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        values = dict(vars(module))
        contents = {
            name: each.copy()
            for name, each in values.items()
            if type(each) in _CONTAINERS
        }
        return cls(module, values, contents)

    def put_back(self) -> None:
        own = vars(self.module)
        own.clear()
        own.update(self.values)
        for name, content in self.contents.items():
            container = self.values[name]
            container.clear()
            add = container.extend if isinstance(container, list) else container.update
            add(content)


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a module and its submodules hold: objects, not what is in their tensors.

    >>> module = nn.Linear(2, 2)
    >>> held = Attributes.of(module)
    >>> module.extra, module.bias = nn.ReLU(), None
    >>> held.put_back()
    >>> hasattr(module, "extra"), module.bias is None
    (False, False)
    """

    modules: tuple[_Held, ...]

    @classmethod
    def of(cls, root: nn.Module) -> Self:
        """Note what there is."""
        return cls(tuple(map(_Held.of, root.modules())))

    def put_back(self) -> None:
        """Remove what was added since, and give back what was replaced or removed."""
        for each in self.modules:
            each.put_back()
