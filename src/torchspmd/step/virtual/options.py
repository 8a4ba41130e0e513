"""How much ``compile(verify=...)`` runs, and what is too much."""

from dataclasses import dataclass, fields
from typing import final

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import format_bytes
from torchspmd.errors import UsageError
from torchspmd.step.graph.options import check_integers
from torchspmd.step.graph.roles import output_values
from torchspmd.step.virtual.axes import RankLayout


@final
@dataclass(frozen=True, slots=True)
class Verification:
    """How ``compile(verify=...)`` compares graphs.

    Args:
        ranks: Virtual ranks along each axis whose size the graph leaves open, at least 4:
            a sum of two or three terms shows too few of the orders.
        steps: How many steps, state carried over.
        max_ranks: The most virtual ranks. A ring is run on as many ranks as the real group
            has, since passes lay buckets out for these; above, it is not run and the
            certificate says so.
        limit_bytes: The most that inputs and outputs of all virtual ranks may take; above,
            nothing is compared and the certificate says so.
        seed: For the batches of the other ranks, and random operators.

    Example:
        >>> Verification(ranks=8)
        Verification(ranks=8, steps=2, max_ranks=32, limit_bytes=4294967296, seed=0)
    """

    ranks: int = 4
    steps: int = 2
    max_ranks: int = 32
    limit_bytes: int = 4 << 30
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"max_ranks": 1, "limit_bytes": 1}
        whole = {
            field.name: (getattr(self, field.name), least.get(field.name))
            for field in fields(self)
        }
        check_integers("Verification", **whole)
        if self.ranks < 4 or self.steps < 1:
            raise UsageError(
                f"Verification(ranks={self.ranks}, steps={self.steps}): take at least 4 "
                "ranks, since fewer do not show the order of a sum, and one step."
            )


def too_large(graph: fx.Graph, layout: RankLayout, options: Verification) -> str:
    """Why these virtual ranks are too many or too much; empty when they are not."""
    if layout.size > options.max_ranks:
        return (
            f"{layout} are more than {options.max_ranks}: raise max_ranks of "
            "verify=Verification(...), or verify on a smaller mesh."
        )
    values = [*graph.find_nodes(op="placeholder"), *output_values(graph)]
    total = layout.size * sum(_bytes(value) for value in values)
    if total > options.limit_bytes:
        return (
            f"inputs and outputs of {layout} take {format_bytes(total)}, above the limit "
            f"of {format_bytes(options.limit_bytes)}: raise limit_bytes of "
            "verify=Verification(...), or verify a smaller model."
        )
    return ""


def _bytes(node: object) -> int:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return 0
    return _torch.size_hint(value.numel()) * value.element_size()
