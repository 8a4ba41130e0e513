"""Every kind of parallel layer in one graph of torch.compile, with one device's numbers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from torchspmd.parallel import (
    ColwiseParallel,
    FusedColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.out = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (-1, 4)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm1 = nn.RMSNorm(16)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm1(x))
        x = x + self.down(torch.relu(self.up(self.norm2(x))))
        return self.head(x)


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "attention.qkv": FusedColwiseParallel(parts=(16, 16, 16), num_heads=(4, 4, 4)),
    "attention.out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def compiled_step(backend):
    torch._dynamo.reset()
    counters.clear()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    reference = Model()
    parallel = parallelize_module(copy.deepcopy(reference), mesh, PLAN)
    tokens = torch.randint(32, (2, 8))
    output = torch.compile(parallel, backend=backend, fullgraph=True)(tokens)
    expected = reference(tokens)
    torch.testing.assert_close(output, expected)
    output.square().mean().backward()
    expected.square().mean().backward()
    gradients = dict(parallel.named_parameters())
    compared = 0
    for name, value in reference.named_parameters():
        if name in gradients:  # the fused projection's parts have names of their own
            gradient = gradients[name].grad
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(
                full, value.grad, msg=lambda m, n=name: f"{n}: {m}"
            )
            compared += 1
    return compared, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_every_kind_of_layer_in_one_graph(ranks2, backend):
    assert ranks2.run(compiled_step, backend, timeout=180) == [(11, 1)] * 2
