"""What an operator's schema says about its arguments and its result."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
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
    is_out = torch.Tag.out in operator.tags or schema.name.endswith("_out")
    names = tuple(
        argument.name
        for argument in schema.arguments
        if not (is_out and argument.kwarg_only and argument.name in written)
    )
    return Signature(
        _functional_name(schema.name, bool(written)),
        operator._overloadname.removesuffix("default"),
        names,
        {a.name: a.default_value for a in schema.arguments if a.has_default_value()},
        written,
        torch.Tag.nondeterministic_seeded in operator.tags,
        torch.Tag.pointwise in operator.tags,
    )


def _functional_name(name: str, writes: bool) -> str:
    return name.removesuffix("_out").removesuffix("_") if writes else name
