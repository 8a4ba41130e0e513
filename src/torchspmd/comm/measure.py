"""From an operator and its arguments to sizes: dtype, shape, payload and wire bytes.

Only shapes and dtypes are read, so real, fake and meta tensors measure alike.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch

from torchspmd import _torch
from torchspmd.comm.kinds import Kind, Operator


class Measure(NamedTuple):
    """What one communication moves; see ``CommEvent`` for the fields."""

    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int
    wire_bytes: int


def measure(
    operator: Operator, arguments: Mapping[str, object], group_size: int
) -> Measure:
    """Measure one call, given its arguments by name.

    >>> from torchspmd.comm.kinds import TABLE
    >>> shard = torch.empty(2, 8, device="meta")
    >>> gather = TABLE["_c10d_functional::all_gather_into_tensor"]
    >>> measure(gather, {"input": shard}, group_size=4).payload_bytes
    256
    """
    if operator.buffer == "A @ B":
        return _measure_product(operator.kind, arguments, group_size)
    buffer = _buffer(operator, arguments)
    if isinstance(buffer, torch.Tensor):
        dtype, shape, payload = _measure_one(buffer)
    else:
        tensors = list(_torch.leaves_of(torch.Tensor, buffer))
        dtype, shape = _dtype(tensors), _shape(tensors)
        payload = sum(map(_bytes, tensors))
    if operator.is_shard:
        payload *= group_size
    if operator.kind is Kind.SEND_RECV:
        wire = _sent_bytes(arguments)
    else:
        wire = wire_bytes(operator.kind, payload, group_size)
    return Measure(dtype, shape, payload, wire)


def _measure_one(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], int]:
    num_elements = tensor.numel()
    if type(num_elements) is int:  # almost always: no symbols, so no look at each size
        shape = tuple(tensor.shape)
    else:
        num_elements, shape = _torch.size_hint(num_elements), _sizes(tensor.shape)
    return _dtype_name(tensor.dtype), shape, num_elements * tensor.element_size()


def _buffer(operator: Operator, arguments: Mapping[str, object]) -> object:
    if operator.kind is Kind.UNKNOWN:
        return next(
            (a for a in arguments.values() if [*_torch.leaves_of(torch.Tensor, a)]),
            None,
        )
    return arguments.get(operator.buffer)


def _dtype(tensors: list[torch.Tensor]) -> str:
    names = {_dtype_name(tensor.dtype) for tensor in tensors}
    if not names:
        return "none"
    return names.pop() if len(names) == 1 else "mixed"


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    if len(tensors) == 1:
        return _sizes(tensors[0].shape)
    if not tensors:
        return ()
    return (sum(_torch.size_hint(tensor.numel()) for tensor in tensors),)


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    # A ledger holds numbers: symbols of a dynamic trace do not hash and do not last.
    return tuple(map(_torch.size_hint, shape))


def _bytes(tensor: torch.Tensor) -> int:
    return _torch.size_hint(tensor.numel()) * tensor.element_size()


def _sent_bytes(arguments: Mapping[str, object]) -> int:
    """The sending half of a batch of sends and receives."""
    directions, tensors = arguments["op_list"], arguments["tensors"]
    assert isinstance(directions, (list, tuple)), type(directions)
    assert isinstance(tensors, (list, tuple)), type(tensors)
    return sum(
        _bytes(tensor)
        for direction, tensor in zip(directions, tensors, strict=True)
        if "send" in direction
    )


def _measure_product(
    kind: Kind, arguments: Mapping[str, object], group_size: int
) -> Measure:
    """A fused matmul and reduce-scatter sends the product, in the output's dtype."""
    left, right = arguments["A"], arguments["B"]
    assert isinstance(left, torch.Tensor), type(left)
    assert isinstance(right, torch.Tensor), type(right)
    dtype = arguments.get("out_dtype") or left.dtype
    assert isinstance(dtype, torch.dtype), type(dtype)
    shape = _sizes((*left.shape[:-1], right.shape[-1]))
    payload = torch.Size(shape).numel() * dtype.itemsize
    return Measure(
        _dtype_name(dtype), shape, payload, wire_bytes(kind, payload, group_size)
    )


# ----------------------------------------------------------------------------
# Bytes on the wire, per rank, in the ring convention.
#
# ``wire_bytes`` is what one rank sends, averaged over the group, so that the sum over all
# ranks is the traffic that crossed the network. With S payload bytes and n ranks:
#
# | kind                                    | one rank sends       |
# |-----------------------------------------|----------------------|
# | all_reduce                              | 2 (n-1)/n S          |
# | all_gather, reduce_scatter, all_to_all  | (n-1)/n S            |
# | broadcast, reduce                       | (n-1)/n S            |
# | gather, scatter                         | (n-1)/n S/n          |
# | send                                    | S (its recv sends 0) |
# | send_recv (a batch)                     | what it sends        |
# | barrier, unknown                        | 0                    |
#
# S is the whole logical buffer: the output of an all-gather, the input of a
# reduce-scatter or all-to-all. Fractions of a byte are rounded up.

_ROUNDS = {
    Kind.ALL_REDUCE: 2,
    Kind.ALL_GATHER: 1,
    Kind.REDUCE_SCATTER: 1,
    Kind.ALL_TO_ALL: 1,
    Kind.BROADCAST: 1,
    Kind.REDUCE: 1,
}


def wire_bytes(kind: Kind, payload_bytes: int, group_size: int) -> int:
    """What one rank of the group sends for one communication.

    >>> wire_bytes(Kind.ALL_REDUCE, payload_bytes=1024, group_size=4)
    1536
    >>> wire_bytes(Kind.ALL_GATHER, payload_bytes=1024, group_size=4)
    768
    """
    if kind is Kind.SEND:
        return payload_bytes
    if group_size < 2:
        return 0
    others = group_size - 1
    if kind in (Kind.GATHER, Kind.SCATTER):
        return _ceil_div(others * payload_bytes, group_size * group_size)
    return _ceil_div(_ROUNDS.get(kind, 0) * others * payload_bytes, group_size)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(number: int) -> str:
    """A size with at most four digits and a unit.

    >>> format_bytes(512), format_bytes(1536), format_bytes(-3 * 2**20)
    ('512 B', '1.50 KiB', '-3.00 MiB')
    """
    value, unit = float(abs(number)), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    sign = "-" if number < 0 else ""
    if unit == 0:
        return f"{sign}{int(value)} B"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{sign}{value:.{digits}f} {_UNITS[unit]}"


def format_count(number: int, one: str, many: str = "") -> str:
    """A number and its noun.

    >>> format_count(1, "step"), format_count(2, "step"), format_count(2, "axis", "axes")
    ('1 step', '2 steps', '2 axes')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"
