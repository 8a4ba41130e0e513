"""Which operators write into their arguments, share their memory, or could."""

from typing import Any

import torch
from torch._ops import OpOverload

# They hand on the memory of their first argument, but their schemas do not say so.
_SILENT_VIEWS = (
    "aten::_unsafe_view",
    "aten::native_dropout",  # outside of training
    "_c10d_functional::wait_tensor",
    "c10d_functional::wait_tensor",
)
# Elementwise, though not tagged so.
_WRITERS = ("aten::copy", "aten::fill", "aten::zero")


def in_place_form(operator: Any) -> OpOverload | None:
    """The operator that writes its result into its first argument, element by element.

    None for an operator that has no such form, or that reads other elements than the one
    it writes.
    """
    if not isinstance(operator, OpOverload) or operator.namespace != "aten":
        return None
    schema = operator._schema
    name = schema.name.removeprefix("aten::")
    is_list = name.startswith(("_foreach_", "_fused_"))
    is_elementwise = torch.Tag.pointwise in operator.tags or schema.name in _WRITERS
    if schema.is_mutable or not (is_list or is_elementwise):
        return None
    packet = getattr(torch.ops.aten, f"{name}_", None)
    form = getattr(packet, operator._overloadname, None)
    return form if isinstance(form, OpOverload) and 0 in _written(form) else None


def reduction_in_place(operator: Any) -> OpOverload | None:
    """The all-reduce that works in its argument's memory; None for other operators."""
    functional = torch.ops._c10d_functional
    if operator is not functional.all_reduce.default:
        return None
    return functional.all_reduce_.default


def written_arguments(operator: Any) -> tuple[int, ...]:
    """The places of the arguments that an operator writes into."""
    return _written(operator) if isinstance(operator, OpOverload) else ()


def _written(operator: OpOverload) -> tuple[int, ...]:
    return tuple(
        place
        for place, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def shared_arguments(operator: OpOverload) -> tuple[int, ...]:
    """The places of the arguments whose memory an operator's result may lie in."""
    schema = operator._schema
    if schema.name in _SILENT_VIEWS:
        return (0,)
    if all(result.alias_info is None for result in schema.returns):
        return ()
    return tuple(
        place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
    )


def storage_bytes(tensor: torch.Tensor) -> int:
    """The size of the memory that a tensor lies in."""
    return int(tensor.untyped_storage().nbytes())
