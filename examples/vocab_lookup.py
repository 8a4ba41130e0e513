"""A lookup in a vocabulary that is sharded over ranks, compared with one device.

Each rank holds some rows of the table, looks up the words that are its own and returns
zeros for the rest: one term of a sum, declared as ``Partial()``. DTensor adds the terms
up when someone reads the result. The vocabulary does not divide by the number of ranks,
so ranks hold different numbers of rows.

    python examples/vocab_lookup.py [--ranks 3]
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from torchspmd import local_map
from torchspmd.testing import run_ranks

WORDS, WIDTH, BATCH, LENGTH = 101, 8, 4, 6


@local_map(
    out_placements=[Partial()],
    in_placements=(None, None, [Replicate()], [Shard(0)]),
)
def lookup(
    mesh: DeviceMesh, num_words: int, words: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Rows of this rank's part of the table, zeros for words of other ranks."""
    rows_each = -(-num_words // mesh.size())  # as DTensor cuts: the last rank has fewer
    local = words - rows_each * mesh.get_local_rank()
    is_mine = (local >= 0) & (local < table.shape[0])
    rows = torch.nn.functional.embedding(local.where(is_mine, 0), table)
    return rows * is_mine.unsqueeze(-1)


def compare() -> tuple[float, float]:
    """Largest difference from one device, of the rows and of the table's gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    table = torch.randn(WORDS, WIDTH, dtype=torch.float64).requires_grad_()
    words = torch.randint(WORDS, (BATCH, LENGTH))
    expected = torch.nn.functional.embedding(words, table)
    expected.square().sum().backward()

    sharded = distribute_tensor(table.detach(), mesh, [Shard(0)]).requires_grad_()
    everywhere = distribute_tensor(words, mesh, [Replicate()])
    partial = lookup(mesh, WORDS, everywhere, sharded)
    rows = partial.redistribute(placements=[Replicate()])
    rows.square().sum().backward()

    forward = (rows.to_local() - expected).abs().max().item()
    backward = (sharded.grad.full_tensor() - table.grad).abs().max().item()
    return forward, backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    ranks = parser.parse_args().ranks
    forward, backward = run_ranks(compare, ranks)[0]
    print(f"lookup of {WORDS} words on {ranks} ranks against one device:")
    print(f"  rows differ by at most {forward:.1e}, the gradient by {backward:.1e}")


if __name__ == "__main__":
    main()
