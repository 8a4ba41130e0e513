"""Sparse tensors without memory: their indices and values, which are dense.

torch has few shape functions for them, and some that drop what is not zero. The rules here
make the parts of a result from the parts of what is given.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

_aten = torch.ops.aten
_make: Any = torch.sparse_coo_tensor
_make_compressed: Any = torch.sparse_compressed_tensor
_BY_ROW = (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values)
_BY_COLUMN = (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values)
_PARTS = {
    torch.sparse_coo: (torch.Tensor._indices, torch.Tensor._values),
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN,
    torch.sparse_bsc: _BY_COLUMN,
}
_CONVERT = _aten._to_copy.default


def is_sparse(value: object) -> bool:
    """Whether a tensor holds indices and values, and no memory of its own."""
    return isinstance(value, torch.Tensor) and value.layout in _PARTS


def sparse_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Indices and values."""
    for part in _PARTS[tensor.layout]:
        yield part(tensor)


def sparse_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator on sparse tensors gives; NotImplemented where torch knows.

    Operators that make parts go to the dispatcher: they are called under a mode.
    """
    rule = _RULES.get(func)
    return NotImplemented if rule is None else rule(*args, **kwargs)


def _with_parts(
    tensor: torch.Tensor, parts: Sequence[torch.Tensor], *, coalesced: bool
) -> Any:
    if tensor.layout is torch.sparse_coo:
        return _make(
            *parts, tensor.shape, is_coalesced=coalesced, check_invariants=False
        )
    return _make_compressed(
        *parts, tensor.shape, layout=tensor.layout, check_invariants=False
    )


def _convert(tensor: torch.Tensor, **kwargs: Any) -> Any:
    if not is_sparse(tensor):
        return NotImplemented
    is_dense = kwargs.pop("layout", tensor.layout) is torch.strided
    dtype = kwargs.pop("dtype", None)
    kwargs.pop("memory_format", None)
    *places, values = sparse_parts(tensor)
    places = [_CONVERT(part, **kwargs) for part in places]
    parts = [*places, _CONVERT(values, dtype=dtype, **kwargs)]
    result = _with_parts(tensor, parts, coalesced=_is_coalesced(tensor))
    return result.to_dense() if is_dense else result


def _is_coalesced(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.sparse_coo and tensor.is_coalesced()


def _same(tensor: torch.Tensor) -> Any:
    if not is_sparse(tensor):
        return NotImplemented
    parts = [*sparse_parts(tensor)]
    return _with_parts(tensor, parts, coalesced=_is_coalesced(tensor))


def _clone(tensor: torch.Tensor, **_: Any) -> Any:
    if not is_sparse(tensor):
        return NotImplemented
    parts = [part.clone() for part in sparse_parts(tensor)]
    return _with_parts(tensor, parts, coalesced=_is_coalesced(tensor))


def _coalesce(tensor: torch.Tensor) -> Any:
    """No two places are taken to be the same."""
    parts = [part.clone() for part in sparse_parts(tensor)]
    return _with_parts(tensor, parts, coalesced=True)


def _mask(tensor: torch.Tensor, mask: torch.Tensor, *_: Any) -> Any:
    *places, values = sparse_parts(mask)
    parts = [*places, torch.empty_like(values, dtype=tensor.dtype)]
    return _with_parts(mask, parts, coalesced=_is_coalesced(mask))


def _add(tensor: torch.Tensor, other: Any, *, alpha: float = 1) -> Any:
    if is_sparse(tensor):
        return NotImplemented
    return _add_(tensor.clone(), other, alpha=alpha)


def _add_(tensor: torch.Tensor, other: Any, *, alpha: float = 1) -> Any:
    """Rows of a dense tensor."""
    if is_sparse(tensor) or other.layout is not torch.sparse_coo:
        return NotImplemented
    places, values = sparse_parts(other)
    if places.size(0) != 1:
        return NotImplemented
    return tensor.index_add_(0, places[0], values, alpha=alpha)


def _of_values(operator: Any) -> Callable[..., Any]:
    """An operator with one number, which is done to each value."""

    def rule(tensor: Any, other: Any) -> Any:
        is_number = not isinstance(other, torch.Tensor) or not other.dim()
        if not is_sparse(tensor) or not is_number:
            return NotImplemented
        *places, values = sparse_parts(tensor)
        values = operator(values, other)
        if operator._schema.is_mutable:
            return tensor
        return _with_parts(tensor, [*places, values], coalesced=_is_coalesced(tensor))

    return rule


def _num_values(tensor: torch.Tensor) -> int:
    return [*sparse_parts(tensor)][-1].size(0)


_RULES: dict[Any, Callable[..., Any]] = {
    _CONVERT: _convert,
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.clone.default: _clone,
    _aten._coalesce.default: _coalesce,
    _aten.sparse_mask.default: _mask,
    _aten._nnz.default: _num_values,
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: _add_,
    **{
        operator: _of_values(operator)
        for operator in (
            _aten.mul.Tensor,
            _aten.mul_.Tensor,
            _aten.div.Tensor,
            _aten.div_.Tensor,
        )
    },
}
