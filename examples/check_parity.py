"""Is a tensor-parallel model the same model? Check it, then break it and look again.

    python examples/check_parity.py [--ranks 2]

A block of a transformer is laid out over the ranks, trained for three steps there and on
one device, and everything is compared. Then the same with a mistake that trains without
an error: a block that was cut by hand, without the sum that belongs to it.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchspmd.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchspmd.testing import Ranks
from torchspmd.verify import Verdict, check_parity

WORDS, WIDTH = 50, 16


class Block(nn.Module):
    """A norm and two layers on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the stream."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS)
    )


def train_step(
    model: nn.Module, optim: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)


def parallelize_wrongly(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the last block by hand: it runs, but nobody adds the ranks' terms up."""
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    up, down = model[2].up, model[2].down
    for layer, name, dim in ((up, "weight", 0), (up, "bias", 0), (down, "weight", 1)):
        shard = getattr(layer, name).detach().chunk(size, dim)[rank]
        setattr(layer, name, nn.Parameter(shard.clone()))


def check(ranks: Ranks) -> tuple[Verdict, Verdict]:
    """The verdicts on the right plan and on the wrong one."""
    batch = torch.randint(WORDS, (4, 9), generator=torch.Generator().manual_seed(0))
    mesh = {"tp": ranks.world_size}
    right, wrong = (
        check_parity(
            build_model,
            train_step,
            batch,
            parallelize=plan,
            mesh=mesh,
            ranks=ranks,
            raises=False,  # to print it; without, a difference is a ParityError
        )
        for plan in (parallelize, parallelize_wrongly)
    )
    return right, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    with Ranks(parser.parse_args().ranks) as ranks:
        for verdict in check(ranks):
            print(verdict, end="\n\n")


if __name__ == "__main__":
    main()
