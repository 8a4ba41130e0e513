"""Ring attention over a mesh axis, compared with attention on one device.

Each rank holds a piece of the sequence. Keys and values travel around the ring, and each
rank folds what passes by into its own queries with a running softmax. Written for local
tensors; ``local_map`` makes it a function of DTensors whose gradients are right.

    python examples/ring_attention.py [--ranks 4]
"""

import argparse
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchspmd import local_map
from torchspmd.testing import run_ranks

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 24, 8
SEQUENCE = [Shard(2)]  # of (batch, heads, sequence, width)


class Pass(torch.autograd.Function):
    """Hand a tensor to the next rank of the ring; gradients travel back."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        """Send to the next rank, receive from the one before."""
        return exchange(value, step=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """The same in the other direction: the exact transpose."""
        return exchange(grad, step=-1)


def exchange(value: torch.Tensor, step: int) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(value, memory_format=torch.contiguous_format)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, value.contiguous(), (rank + step) % size),
            dist.P2POp(dist.irecv, received, (rank - step) % size),
        ]
    )
    for request in requests:
        request.wait()
    return received


@local_map(out_placements=SEQUENCE, in_placements=(SEQUENCE, SEQUENCE, SEQUENCE))
def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of this rank's queries to the keys of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    positions = torch.arange(q.shape[2]).unsqueeze(1) + rank * q.shape[2]
    total = torch.zeros_like(q)
    top = q.new_full((*q.shape[:3], 1), -math.inf)
    norm = q.new_zeros((*q.shape[:3], 1))
    for turn in range(size):
        owner = (rank - turn) % size
        keys = torch.arange(k.shape[2]) + owner * k.shape[2]
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        scores = scores.masked_fill(keys > positions, -math.inf)
        new_top = torch.maximum(top, scores.amax(3, keepdim=True).detach())
        # Turn 0 is this rank's own piece, so no row stays without a key.
        weights = (scores - new_top).exp()
        rescale = (top - new_top).exp()
        total = total * rescale + weights @ v
        norm = norm * rescale + weights.sum(3, keepdim=True)
        top = new_top
        if turn < size - 1:
            k, v = Pass.apply(torch.stack((k, v))).unbind()
    return total / norm


def compare() -> tuple[float, float]:
    """Largest difference from one device, of the result and of the gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    shape = (BATCH, HEADS, LENGTH, WIDTH)
    full = [torch.randn(shape, dtype=torch.float64).requires_grad_() for _ in range(3)]
    expected = torch.nn.functional.scaled_dot_product_attention(*full, is_causal=True)
    expected.square().sum().backward()

    tensors = [distribute_tensor(t.detach(), mesh, SEQUENCE) for t in full]
    for tensor in tensors:
        tensor.requires_grad_()
    result = ring_attention(*tensors)
    result.square().sum().backward()

    forward = (result.full_tensor() - expected).abs().max().item()
    backward = max(
        (tensor.grad.full_tensor() - one.grad).abs().max().item()
        for tensor, one in zip(tensors, full, strict=True)
    )
    return forward, backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    forward, backward = run_ranks(compare, ranks)[0]
    print(f"ring attention on {ranks} ranks against one device:")
    print(f"  result differs by at most {forward:.1e}, gradients by {backward:.1e}")


if __name__ == "__main__":
    main()
