"""Ranks and inputs of virtual runs, checked before anything runs."""

from collections.abc import Mapping
from typing import Any

from torch import fx

from torchspmd.errors import UsageError
from torchspmd.step.graph.options import check_integers


def check_ranks(what: str, ranks: Any) -> None:
    """Refuse what is neither a number of ranks nor one for each axis."""
    if isinstance(ranks, Mapping):
        for axis, size in ranks.items():
            check_integers(what, **{f"ranks[{axis!r}]": (size, 1)})
        return
    check_integers(what, ranks=(ranks, 1))


def check_inputs(what: str, graph: fx.Graph, inputs: Any) -> None:
    """Refuse flat inputs that are not as many as the graph takes."""
    wanted = len(graph.find_nodes(op="placeholder"))
    if inputs is None or callable(inputs):
        return
    found = len(inputs) if isinstance(inputs, (list, tuple)) else None
    if found != wanted:
        shown = type(inputs).__name__ + ("" if found is None else f" of {found}")
        raise UsageError(
            f"{what}(inputs={shown}): the graph takes {wanted} inputs. Pass a list or "
            "tuple with one value for each placeholder, in their order, a function of "
            "step and rank that returns it, or None to have values made up."
        )
