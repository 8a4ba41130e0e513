"""Embeddings' gradients sent as rows on NCCL ranks, against eager DDP.

Also runs without pytest: ``python tests/gpu/run.py``.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchspmd.step import CostModel, DataParallel, GraphModuleTransformation, compile
from torchspmd.testing import Ranks

DEVICE, BACKEND = "cuda", "nccl"
STEPS, TOKENS, WIDTH = 5, 2048, 64
# Rows are gathered and a tied head's part is reduced: the wire counts as slow.
SLOW = CostModel(network_bytes=1e6, latency_seconds=1e-6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)
        )
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, batch):
        logits = self.head(self.body(self.tokens(batch)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())


def step(model, optim, batch):
    loss = model(batch)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def train(run, model):
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(TOKENS, (4, 16), generator=draw) for _ in range(STEPS)]
    return torch.stack([run(model, optim, batch.to(DEVICE)) for batch in batches])


def against_ddp(inductor):
    torch.manual_seed(0)
    ours = Model().to(DEVICE)
    theirs = copy.deepcopy(ours)
    expected = train(step, DistributedDataParallel(theirs))
    passes = GraphModuleTransformation(
        enable_graph_optimization=True,
        enable_inductor=inductor,
        overlap_iterations=True,
        gather_embeddings=True,
        cost=SLOW,
    )
    transformed = compile(
        parallel_mode=DataParallel("replicate"), gm_transformation=passes
    )(step)
    with transformed as run:
        found = train(run, ours)
    torch.testing.assert_close(found, expected)
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right)
    return [event.kind.value for event in transformed.programs[-1].ledger.events]


def test_rows_in_overlapped_steps():
    with Ranks(2, backend=BACKEND) as ranks:
        for inductor in (False, True):
            kinds, _ = ranks.run(against_ddp, inductor, timeout=240)
            assert kinds.count("all_gather") == 2  # rows and indices
            assert "all_reduce" in kinds
