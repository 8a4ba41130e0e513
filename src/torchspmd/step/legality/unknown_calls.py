"""Calls that are no operators of torch, but tell by their name that they write or draw.

Values are compared by operators. A method, a Python function or a module in a graph is
taken for one that only computes; these are not.
"""

import operator
from collections.abc import Iterator

import torch
from torch import fx

from torchspmd.step.graph.aliases import operator_of
from torchspmd.step.graph.roles import readable_name
from torchspmd.step.legality.edit import Edit, Problem

_WRITES = "Take the operator of torch.ops.aten, whose writes are checked."
_DRAWS = "Leave it out: what the step draws would change."
_IN_PLACE = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv),
    *(operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul),
    *(operator.iand, operator.ior, operator.ixor, operator.setitem),
)
_DRAW = frozenset(
    {"bernoulli", "manual_seed", "multinomial", "normal", "poisson", "seed"}
)


def check_unknown_calls(edit: Edit) -> Iterator[Problem]:
    """What an edit adds; what was there before is the step's own."""
    for node in edit.after.nodes:
        if node in edit.old or operator_of(node) is not None:
            continue
        if _writes(node):
            text = f"{readable_name(node)} is new and writes in place ({_name(node)})"
            yield Problem("state", text, _WRITES)
        elif _draws(node):
            text = (
                f"{readable_name(node)} is new and takes random numbers ({_name(node)})"
            )
            yield Problem("random", text, _DRAWS)


def _writes(node: fx.Node) -> bool:
    if node.op == "call_function" and node.target in _IN_PLACE:
        return True
    if node.op == "call_module":
        module = _module(node)
        return getattr(module, "inplace", False) is True
    name = _name(node)
    is_marked = name.endswith("_") and not name.endswith("__")
    if node.op == "call_function":  # a function of the user's may be called anything
        return is_marked and _is_torch(node)
    return node.op == "call_method" and (is_marked or name == "__setitem__")


def _draws(node: fx.Node) -> bool:
    is_known = node.op == "call_method" or (
        node.op == "call_function" and _is_torch(node)
    )
    name = _name(node)
    return is_known and (name in _DRAW or name.startswith("rand"))


def _is_torch(node: fx.Node) -> bool:
    module = getattr(node.target, "__module__", None) or ""  # none, if it is built in
    is_built_in = getattr(torch, _name(node), None) is node.target
    return is_built_in or module.partition(".")[0] == "torch"


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _module(node: fx.Node) -> object:
    owner = node.graph.owning_module
    if owner is None:
        return None
    try:
        return owner.get_submodule(str(node.target))
    except AttributeError:
        return None
