"""The tensors and modules that a graph reads by name, as they were.

What is not seen: writes into a tensor larger than ``_MOST_KEPT`` that torch does not count
(through ``.data``, NumPy or a kernel of another library), and changes inside of a module
that a graph calls.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import fx, nn

from torchspmd import _torch
from torchspmd.step.graph.roles import readable_name

_MOST_KEPT = 1 << 20  # bytes of a tensor of which a copy is kept
_GONE = object()


@dataclass(frozen=True, slots=True)
class _Constant:
    """One attribute: where it is kept, what it was, and how to know it again."""

    holder: Any
    leaf: str
    value: object
    mark: object  # of a tensor: what changes when it is written
    copy: torch.Tensor | None

    @classmethod
    def of(cls, holder: Any, leaf: str) -> Self:
        value = getattr(holder, leaf, _GONE)
        if not isinstance(value, torch.Tensor):
            return cls(holder, leaf, value, None, None)
        return cls(holder, leaf, value, _mark(value), _copy(value))

    def change(self, now: object) -> str:
        """What became of it, in a few words; empty where it is as it was."""
        if self.copy is not None and isinstance(now, torch.Tensor):
            if _has_same_bits(self.copy, now):
                return ""
        elif now is self.value and self.mark == _mark(now):
            return ""
        if now is _GONE:
            return "is gone"
        return "was written into" if now is self.value else "was replaced"

    def put_back(self) -> None:
        """Undo a replacement, and a write where a copy was kept."""
        holder, leaf, old, copy = self.holder, self.leaf, self.value, self.copy
        if old is _GONE:
            return
        if copy is not None and isinstance(old, torch.Tensor):
            old = _rewritten(old, copy)
        if getattr(holder, leaf, _GONE) is not old:
            _put(holder, leaf, old)


@dataclass(frozen=True, slots=True)
class Constants:
    """What the ``get_attr`` and ``call_module`` nodes of a graph read."""

    kept: Mapping[str, _Constant]

    @classmethod
    def of(cls, gm: Any) -> Self:
        """Note what the graph of a module, or of an ``IterGraphModule``, reads."""
        kept: dict[str, _Constant] = {}
        for node in _readers(gm.graph):
            holder: Any = _owner(gm)
            path = str(node.target).split(".")
            for depth, leaf in enumerate(path, start=1):
                name = ".".join(path[:depth])
                if name not in kept:
                    kept[name] = _Constant.of(holder, leaf)
                holder = kept[name].value
        return cls(kept)

    def changes(self, gm: Any) -> list[str]:
        """What the module's graph still reads and is not what it was, a text each.

        >>> graph = fx.Graph()
        >>> made = graph.output(graph.get_attr("kept"))
        >>> gm = fx.GraphModule({"kept": torch.ones(2)}, graph)
        >>> constants = Constants.of(gm)
        >>> found = gm.kept.zero_()
        >>> constants.changes(gm)
        ["the tensor 'kept', which kept reads, was written into"]
        >>> constants.put_back()
        >>> gm.kept.tolist()
        [1.0, 1.0]
        """
        found: dict[str, str] = {}
        for node in _readers(gm.graph):
            name = str(node.target)
            kept = self.kept.get(name)
            change = "" if kept is None else kept.change(_find(_owner(gm), name))
            if kept is not None and change:
                what = "tensor" if isinstance(kept.value, torch.Tensor) else "attribute"
                text = (
                    f"the {what} {name!r}, which {readable_name(node)} reads, {change}"
                )
                if change == "was written into" and kept.copy is None:
                    text += " (it is too large to be put back)"
                found.setdefault(name, text)
        return list(found.values())

    def put_back(self) -> None:
        """Give back what was replaced, and what small tensors held."""
        for each in self.kept.values():
            each.put_back()


def _readers(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op in ("get_attr", "call_module"))


def _owner(gm: Any) -> Any:
    return getattr(gm, "main_gm", gm)


def _find(holder: Any, name: str) -> object:
    for leaf in name.split("."):
        holder = getattr(holder, leaf, _GONE)
    return holder


def _is_plain(tensor: torch.Tensor) -> bool:
    is_own = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    return is_own and is_strided and not _torch.is_fake(tensor)


def _mark(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return None
    version = 0 if value.is_inference() else _torch.version_of(value)
    return version, value.data_ptr() if _is_plain(value) else 0


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    if not _is_plain(tensor) or tensor.numel() * tensor.element_size() > _MOST_KEPT:
        return None
    copy = tensor.detach().clone()
    return copy if _is_plain(copy) else None


def _has_same_bits(copy: torch.Tensor, now: torch.Tensor) -> bool:
    if not _is_plain(now) or (copy.device, copy.dtype) != (now.device, now.dtype):
        return False
    if copy.shape != now.shape:
        return False
    return torch.equal(_bytes(copy), _bytes(now))


def _rewritten(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """A tensor with the values of a copy: the same object where it can hold them."""
    if _has_same_bits(copy, tensor):
        return tensor
    if (tensor.shape, tensor.stride()) != (copy.shape, copy.stride()):
        return copy.clone()
    with torch.no_grad():
        tensor.copy_(copy)
    return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _put(holder: Any, leaf: str, old: object) -> None:
    if isinstance(old, nn.Parameter) or not isinstance(old, torch.Tensor):
        setattr(holder, leaf, old)
        return
    if isinstance(getattr(holder, leaf, None), nn.Parameter):
        delattr(holder, leaf)  # a module takes no plain tensor in its place
    if hasattr(holder, leaf):
        setattr(holder, leaf, old)
    else:
        holder.register_buffer(leaf, old)
