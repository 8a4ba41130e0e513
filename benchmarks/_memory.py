"""Bytes that are alive while code runs, counted on any device."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryCounter(TorchDispatchMode):
    """Looks at every operator's results, and at which memory still exists.

    Memory that a kernel takes and gives back while it runs is not seen.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.worst = ""
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._count(tensors, "start")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count(tree_leaves((args, kwargs, result)), str(func))
        return result

    def _count(self, leaves: Iterable[Any], what: str) -> None:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)
                self._alive[reference.cdata] = (reference, storage.nbytes())
        self._alive = {
            key: entry for key, entry in self._alive.items() if not entry[0].expired()
        }
        total = sum(size for _, size in self._alive.values())
        if total > self.peak_bytes:
            self.peak_bytes, self.worst = total, what
