"""Counts in the shapes that users of CommDebugMode read them in."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from torchspmd.comm import GLOBAL, Ledger, is_within


class ModuleCounts(dict[str, "defaultdict[Any, int]"]):
    """Counts of one module by phase; an operator packet as key gives all phases.

    Forward and backward are always there, recompute and optimizer when they happened.
    """

    def __init__(self) -> None:
        super().__init__(forward=defaultdict(int), backward=defaultdict(int))

    def add(self, phase: str, packet: Any, count: int) -> None:
        """Count some more."""
        self.setdefault(phase, defaultdict(int))[packet] += count

    def __missing__(self, packet: Any) -> Any:
        if isinstance(packet, str):
            raise KeyError(packet)
        return sum(counts.get(packet, 0) for counts in self.values())


def packet(name: str) -> Any:
    """``torch.ops.<namespace>.<name>``, or the native one where torch has no other."""
    namespace, _, base = name.partition(".")
    found = getattr(getattr(torch.ops, namespace), base, None)
    return found or getattr(torch.ops._c10d_functional, base)


def count_packets(ledger: Ledger, *, checks: bool) -> dict[Any, int]:
    """Counts by operator packet."""
    counts: dict[Any, int] = defaultdict(int)
    for key, total in ledger.rows.items():
        if checks or not key.check:
            counts[packet(key.op)] += total.count
    return counts


def count_modules(
    ledger: Ledger, modules: Mapping[str, object]
) -> dict[str, ModuleCounts]:
    """Counts by module path: each module that communicated, and those around it."""
    counts: dict[str, ModuleCounts] = {}
    for key, total in ledger.rows.items():
        around = [path for path in modules if is_within(key.module, path)]
        for path in {GLOBAL: None, **dict.fromkeys(around), key.module: None}:
            module_counts = counts.setdefault(path, ModuleCounts())
            module_counts.add(key.phase.value, packet(key.op), total.count)
    return counts
