"""What an operator's schema says about its arguments and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload


@dataclass(frozen=True, slots=True)
class Signature:
    """How to read a call of one operator.

    Attributes:
        name: ``namespace::name`` of its functional form: ``aten::add`` for ``add_`` too.
        overload: The overload, empty for the default one.
        arguments: The names of its arguments, in order; without those it only writes to.
        defaults: The values of arguments that a call may leave out.
        written: The names of the arguments that it writes into.
        draws: Whether it takes random numbers.
        is_elementwise: Whether each element of the result depends on that element alone.
    """

    name: str
    overload: str
    arguments: tuple[str, ...]
    defaults: dict[str, Any]
    written: tuple[str, ...]
    draws: bool
    is_elementwise: bool


@cache
def signature_of(operator: OpOverload) -> Signature:
    """Read an operator's schema."""
    schema = operator._schema
    written = tuple(
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    names = tuple(a.name for a in schema.arguments if not a.is_out)
    return Signature(
        _functional_name(schema.name, bool(written)),
        operator._overloadname.removesuffix("default"),
        names,
        {a.name: a.default_value for a in schema.arguments if a.has_default_value()},
        written,
        _is_seeded(operator),
        torch.Tag.pointwise in operator.tags,
    )


def _functional_name(name: str, writes: bool) -> str:
    return name.removesuffix("_out").removesuffix("_") if writes else name


def draws_random_numbers(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a call takes numbers from a generator."""
    if not isinstance(operator, OpOverload) or not _is_seeded(operator):
        return False
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":  # attention draws for nothing else
            given = args[place] if place < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", given))
    return True


def _is_seeded(operator: OpOverload) -> bool:
    """Whether an operator may draw; a backward of attention is given its forward's seed."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    return all(
        argument.name != "philox_seed" for argument in operator._schema.arguments
    )


def only_has_effects(operator: Any) -> bool:
    """Whether an operator returns and writes nothing, and fx would remove it."""
    if not isinstance(operator, OpOverload) or operator.namespace == "profiler":
        return False
    if operator._schema.returns or operator._schema.is_mutable:
        return False
    return not fx.Graph().call_function(operator).is_impure()
