"""Operations of attention, counted where heads of queries share keys and values."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchspmd.step.graph.cost import CostModel


def seconds(heads: int, shared: int) -> float:
    def attend(query, key):
        return torch.ops.aten._scaled_dot_product_flash_attention.default(
            query, key, key
        )[0]

    query, key = (
        torch.empty(1, count, 16, 64, device="meta", dtype=torch.bfloat16)
        for count in (heads, shared)
    )
    graph = make_fx(attend, tracing_mode="fake")(query, key).graph
    node = next(each for each in graph.nodes if "flash" in str(each.target))
    cost = CostModel(flops=1.0, memory_bytes=1e30, launch_seconds=0.0)
    return cost.compute_seconds(node)


def test_heads_that_share_keys_compute_no_less():
    assert seconds(8, 2) == seconds(8, 8) == 4 * 8 * 16 * 16 * 64
