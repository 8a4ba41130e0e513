"""Steps that send embeddings' gradients as rows follow DDP, up to the order of sums."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchspmd.errors import AgreementError
from torchspmd.step import (
    CostModel,
    DataParallel,
    GraphModuleTransformation,
    compile,
    switches,
)

pytestmark = pytest.mark.ranks

SLOW = CostModel(network_bytes=1e6, latency_seconds=1e-6)
TOKENS, WIDTH = 300, 8


class Net(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH, padding_idx=3)
        self.places = nn.Embedding(64, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, batch):
        places = torch.arange(batch.shape[1])
        hidden = self.tokens(batch) + self.places(places)
        return nn.functional.cross_entropy(
            self.head(hidden + self.body(hidden).relu()).flatten(0, 1), batch.flatten()
        )


def train_step(model, optim, batch):
    loss = model(batch)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def make(tied):
    torch.manual_seed(0)
    model = Net(tied=tied)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def transformation(overlap):
    return GraphModuleTransformation(
        enable_graph_optimization=True,
        overlap_iterations=overlap,
        gather_embeddings=True,
        cost=SLOW,
    )


def follow_ddp(tied, overlap, verify):
    """How far the parameters are from those of DDP, and what was said of the step."""
    model, optim = make(tied)
    theirs, their_optim = make(tied)
    ddp = DistributedDataParallel(theirs)
    passes = transformation(overlap)
    step = compile(
        gm_transformation=passes,
        parallel_mode=DataParallel("replicate"),
        verify=verify,
    )(train_step)
    draw = torch.Generator().manual_seed(dist.get_rank())
    with step as run:
        for _ in range(4):
            batch = torch.randint(TOKENS, (2, 5), generator=draw)
            loss = run(model, optim, batch)
            torch.testing.assert_close(loss, train_step(ddp, their_optim, batch))
    pairs = zip(model.parameters(), theirs.parameters(), strict=True)
    gap = max((one - two).abs().max().item() for one, two in pairs)
    report = next(r for r in passes.reports if r.name == "gather_embedding_gradients")
    return gap, report.outcome.changed, report.proof, str(step.programs[-1].certificate)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_follow_ddp(ranks2, tied):
    for overlap in (False, True):
        for gap, changed, proof, _ in ranks2.run(follow_ddp, tied, overlap, False):
            assert gap < 1e-6
            assert changed == 2  # of tokens and of places
            assert proof == "proved equal"


def test_virtual_ranks_have_as_many_as_the_graph(ranks2):
    *_, text = ranks2.run(follow_ddp, True, True, True)[0]
    assert "gather_embedding_gradients" in text
    assert "2 virtual ranks" in text


def batches_of_two_shapes():
    model, optim = make(False)
    step = compile(
        gm_transformation=transformation(False), parallel_mode=DataParallel("replicate")
    )(train_step)
    batch = torch.ones(2 + dist.get_rank(), 5, dtype=torch.long)
    with pytest.raises(AgreementError, match="batch"):
        step(model, optim, batch)


def test_ranks_with_other_batches_are_told(ranks2):
    ranks2.run(batches_of_two_shapes)


def known_programs(sizes, seconds):
    """All ranks know programs for batches of 2, 4 and 6; then each takes another one."""
    switches.SECONDS = seconds
    model, optim = make(False)
    step = compile(
        gm_transformation=transformation(False), parallel_mode=DataParallel("replicate")
    )(train_step)
    batches = {size: torch.ones(size, 5, dtype=torch.long) for size in (2, 4, 6)}
    for size in (2, 2, 4, 6, 2, 6, 4):  # these switches are made together
        step(model, optim, batches[size])
    size = sizes[dist.get_rank()]
    if size is None:
        return ""
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(AgreementError) as told:
        step(model, optim, batches[size])
    assert all(map(torch.equal, model.parameters(), before))
    return str(told.value)


def test_ranks_that_take_up_other_programs_are_told(ranks2):
    texts = ranks2.run(known_programs, (2, 6), 60.0)
    assert all("ranks would run programs that do not send the same" in t for t in texts)
    assert all("rank 0 runs program 1\n  * rank 1 runs program 3" in t for t in texts)
    assert all("pad or drop the last one" in text for text in texts)


def test_a_rank_that_takes_up_a_program_alone_is_told(ranks2):
    text, _ = ranks2.run(known_programs, (2, None), 1.0)
    assert "rank 1 runs another after 1 s" in text
