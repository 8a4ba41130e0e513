"""Steps that send embeddings' gradients as rows follow DDP, up to the order of sums."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import train_own_loss as train_step
from training import train_sum

from torchspmd.errors import AgreementError
from torchspmd.step import (
    CostModel,
    DataParallel,
    GraphModuleTransformation,
    compile,
    rank_agreement,
)

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
        gm_transformation=passes, parallel_mode=DataParallel("replicate"), verify=verify
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


@pytest.mark.parametrize(
    ("tied", "overlap", "verify"),
    [(False, False, False), (False, True, False), (True, True, True)],
)
def test_parameters_follow_ddp(ranks2, tied, overlap, verify):
    for gap, changed, proof, text in ranks2.run(follow_ddp, tied, overlap, verify):
        assert gap < 1e-6
        assert changed == 2  # of tokens and of places
        assert proof == "proved equal"
        if verify:  # virtual ranks are as many as the graph needs
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


def known_programs(together, apart, seconds):
    """All ranks run batches of some sizes together; then each takes its own one."""
    rank_agreement.SWITCH_SECONDS = seconds
    model, optim = make(False)
    step = compile(
        gm_transformation=transformation(False), parallel_mode=DataParallel("replicate")
    )(train_step)

    def run(size):
        step(model, optim, torch.ones(size, 5, dtype=torch.long))

    for size in together:
        run(size)
    own = apart[dist.get_rank()]
    if own is None:
        return ""
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(AgreementError) as told:
        run(own)
    assert all(map(torch.equal, model.parameters(), before))
    if None not in apart:
        run(2)  # the cure that the error names
    return str(told.value)


MANY = 200  # rows of so many tokens are not gathered: the table is reduced


def test_ranks_that_take_up_other_programs_are_told(ranks2):
    together = (2, 2, 4, 6, MANY, 2, 6, 4)  # these switches are made together
    texts = ranks2.run(known_programs, together, (2, 6), 60.0)
    assert all("ranks would run programs that do not send the same" in t for t in texts)
    assert all("rank 0 runs program 0\n  * rank 1 runs program 2" in t for t in texts)
    assert all("pad or drop the last one" in text for text in texts)


@pytest.mark.parametrize("own", [4, MANY])
def test_a_rank_that_takes_up_a_program_alone_is_told(ranks2, own):
    text, _ = ranks2.run(known_programs, (2, 2, 4, MANY, 2), (own, None), 1.0)
    assert "rank 1 did not come within 1 s. Ranks may run programs that do not" in text


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, which):
        return (self.one, self.two)[which](x).square().sum()


def steps_of_two(which, seconds):
    rank_agreement.SWITCH_SECONDS = seconds

    def step(model, optim, x, which):
        loss = model(x, which)
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    model = Two()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    run = compile(parallel_mode=DataParallel("replicate"))(step)
    for each in (0, 1, 0, 1):
        run(model, optim, torch.ones(2, 4), each)
    if dist.get_rank() == 0:
        with pytest.raises(AgreementError, match="do not send the same"):
            run(model, optim, torch.ones(2, 4), which)


def test_equal_sizes_for_other_parameters_are_not_the_same(ranks2):
    ranks2.run(steps_of_two, 0, 1.0)


def shapes_of_one_model():
    """How often ranks had to meet for programs that reduce the same gradients."""
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    run = compile(train_sum, parallel_mode=DataParallel("replicate"))
    for size in (2, 4, 2, 4, 2 + 2 * dist.get_rank()):
        run(model, optim, torch.ones(size, 4))
    return run._switches._count


def test_batches_of_other_shapes_need_no_meeting(ranks2):
    assert ranks2.run(shapes_of_one_model, timeout=60) == [0, 0]
