"""``nn.Embedding`` on this rank's columns or rows of the table."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from torchspmd.parallel.axis import shard_offset, shard_size
from torchspmd.parallel.handover import change_layout
from torchspmd.parallel.parameters import local_shards, wrong_shard
from torchspmd.parallel.route import Route, check_tensor, enter, leave


class LocalEmbedding(nn.Embedding):
    """An Embedding whose table is a DTensor and whose forward runs on its shard.

    ``parallelize_module`` turns an ``nn.Embedding`` into one; it is not built by hand.
    """

    route: Route

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows of the table at these indices, in the layout of the style."""
        route = self.route
        check_tensor(input, route)
        steps = route.steps(input.ndim, input.ndim + 1)
        value = enter(input, route, steps)
        # Indices have no gradient, so their layout changes in one direction only.
        index = change_layout(
            value.tensor, value.layout, steps.needed, route.axis, value.shape
        )
        (table,) = local_shards([self.weight])
        assert table is not None
        expected = _shard_shape(self)
        if table.shape != expected:
            raise wrong_shard(route.where, "weight", table, expected)
        if type(route.made) is Shard:
            output = F.embedding(index, table, self.padding_idx)
        else:
            output = _look_up_rows(self, index, table)
        shape = (*value.shape, self.embedding_dim)
        output = change_layout(output, steps.made, steps.wanted, route.axis, shape)
        return leave(output, route, steps, shape)

    def extra_repr(self) -> str:
        """The layer's sizes and its style."""
        return f"{super().extra_repr()}, {self.route}"


def _shard_shape(module: LocalEmbedding) -> tuple[int, int]:
    axis, rows, columns = module.route.axis, module.num_embeddings, module.embedding_dim
    if type(module.route.made) is Shard:
        return rows, shard_size(columns, axis.size, axis.rank)
    return shard_size(rows, axis.size, axis.rank), columns


def _look_up_rows(
    module: LocalEmbedding, index: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """This rank's rows, and zeros where another rank holds the row."""
    axis, num_rows = module.route.axis, module.num_embeddings
    first = shard_offset(num_rows, axis.size, axis.rank)
    length = shard_size(num_rows, axis.size, axis.rank)
    if length == 0:
        # An empty table has no row to look up; it still takes part in the sum.
        return table.new_zeros(*index.shape, module.embedding_dim) + table.sum()
    padding = module.padding_idx
    if padding is not None:
        padding = padding - first if first <= padding < first + length else None
    local = index - first
    elsewhere = (local < 0) | (local >= length)
    # A row number outside of the whole table must stay an error, as on one device.
    local = torch.where(elsewhere & (index >= 0) & (index < num_rows), 0, local)
    rows = F.embedding(local, table, padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)
