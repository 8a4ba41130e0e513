"""Answers to questions about values that nobody knows agree with each other."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torchspmd.rehearse.recording import Op, Synchronize

TOKENS, EXPERTS, WIDTH = 64, 8, 24


def routed(k=2):
    """Which experts tokens are sent to: unknown on a device without values."""
    scores = torch.rand(TOKENS, EXPERTS, device="cuda").softmax(-1)
    return scores.topk(k, dim=-1).indices


EVEN = [TOKENS * 2 // EXPERTS] * EXPERTS


@pytest.mark.parametrize(
    "count",
    [
        lambda chosen: torch.bincount(chosen.view(-1), minlength=EXPERTS),
        lambda chosen: torch.bincount(chosen.view(-1)),
        lambda chosen: torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1).int(),
        lambda chosen: torch.histc(chosen, EXPERTS, 0, EXPERTS - 1),
        lambda chosen: F.one_hot(chosen, EXPERTS).sum((0, 1)),
        lambda chosen: F.one_hot(chosen, EXPERTS).view(-1, EXPERTS).sum(0),
        lambda chosen: chosen.unique(return_counts=True)[1],
        lambda chosen: torch.stack([(chosen == e).sum() for e in range(EXPERTS)]),
        lambda chosen: chosen.new_zeros(TOKENS, EXPERTS).scatter_(1, chosen, 1).sum(0),
        lambda chosen: torch.zeros(
            EXPERTS, dtype=torch.int64, device="cuda"
        ).index_add_(0, chosen.view(-1), torch.ones_like(chosen.view(-1))),
        lambda chosen: torch.diff(
            torch.searchsorted(
                chosen.view(-1).sort().values,
                torch.arange(EXPERTS + 1, device="cuda"),
            )
        ),
    ],
)
def test_counts_of_choices_are_even_and_add_up(rehearse, count):
    with rehearse() as recording:
        counts = count(routed())
        assert counts.cpu().tolist() == EVEN
        assert counts.cpu().numpy().tolist() == EVEN
        assert counts.sum().item() == TOKENS * 2
        assert counts.cumsum(0).tolist() == [16 * (e + 1) for e in range(EXPERTS)]
    assert any("is taken to" in note for note in recording.notes)
    assert all("test_assumed_values.py" in note for note in recording.notes)


def test_one_hot_rows_of_many_experts_are_counted(rehearse):
    """8.4 million numbers, which are followed as truths."""
    with rehearse() as recording:
        chosen = torch.randn(2048, 512, device="cuda").topk(8, -1).indices
        mask = F.one_hot(chosen, 512)
        assert mask.sum((0, 1)).tolist() == [32] * 512
        of_one = mask.permute(2, 1, 0)[5]
        assert torch.where(of_one)[1].shape == (32,)
    assert not any("all are chosen" in note for note in recording.notes)


def test_a_list_of_values_is_read_at_once(rehearse):
    with rehearse() as recording:
        counts = torch.bincount(routed().view(-1), minlength=EXPERTS)
        before = len(recording.events)
        counts.tolist()
        waits = [event.reason for event in recording.events[before:]]
        assert waits == ["tolist"]
        counts.cpu()
        assert recording.events[-1].reason == "aten._to_copy.default"


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (lambda scores: scores.argmax(-1), 8),
        (lambda scores: scores.max(-1).indices, 8),
        (lambda scores: scores.sort(-1, descending=True).indices[:, :1], 8),
        (lambda scores: scores.argsort(dim=-1)[:, 1], 8),
        (lambda scores: torch.multinomial(scores, 1), 8),
        (lambda scores: scores.t().topk(3, dim=0).indices, 24),
        (lambda scores: scores.topk(3, -1).indices, 24),
    ],
)
def test_choices_are_spread_evenly_however_they_are_made(rehearse, choose, expected):
    with rehearse():
        chosen = choose(torch.rand(TOKENS, EXPERTS, device="cuda"))
        counts = torch.bincount(chosen.reshape(-1), minlength=EXPERTS)
        assert counts.tolist() == [expected] * EXPERTS


def test_choices_of_one_row_differ(rehearse):
    with rehearse():
        for row in routed(3).tolist():
            assert len(set(row)) == 3


def test_offsets_are_written_into_a_buffer(rehearse):
    with rehearse():
        counts = torch.bincount(routed().view(-1), minlength=EXPERTS)
        ends = torch.zeros(EXPERTS + 1, dtype=torch.int32, device="cuda")
        ends[1:] = counts.cumsum(0)
        assert ends.tolist() == [16 * e for e in range(EXPERTS + 1)]
        ends[2:].add_(torch.randint(0, 2, (EXPERTS - 1,), device="cuda"))
        assert ends.tolist() == [1] * (EXPERTS + 1)  # nobody knows any more


def experts_by_split(x, chosen, experts):
    order = chosen.view(-1).argsort()
    counts = torch.bincount(chosen.view(-1), minlength=EXPERTS).tolist()
    parts = x[order // 2].split(counts)
    made = torch.cat([f(part) for f, part in zip(experts, parts, strict=True)])
    return torch.zeros_like(x).index_add_(0, order // 2, made)


def experts_by_where(x, chosen, experts):
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows, _ = torch.where(chosen == number)
        if rows.numel() == 0:
            continue
        out.index_add_(0, rows, expert(x[rows]))
    return out


def experts_by_mask(x, chosen, experts):
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        mask = (chosen == number).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
    return out


def experts_that_are_hit(x, chosen, experts):
    """As in Hugging Face's mixtures."""
    out = torch.zeros_like(x)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number in (mask.sum((-1, -2)) > 0).nonzero():
        _, rows = torch.where(mask[number].squeeze(0))
        out.index_add_(0, rows, experts[number](x[None, rows].reshape(-1, WIDTH)))
    return out


@pytest.mark.parametrize(
    "mixture",
    [experts_by_split, experts_by_where, experts_by_mask, experts_that_are_hit],
)
def test_each_expert_works_on_its_share(rehearse, mixture):
    with rehearse() as recording:
        with torch.device("cuda"):
            experts = nn.ModuleList(
                nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS)
            )
            x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        mixture(x, routed(), experts).sum().backward()
        assert x.grad.shape == x.shape
        assert all(each.weight.grad is not None for each in experts)
    products = [
        event.inputs[0].shape
        for event in recording.events
        if isinstance(event, Op) and event.name == "aten.mm.default"
    ]
    forward = [shape for shape in products if shape == (TOKENS * 2 // EXPERTS, WIDTH)]
    assert len(forward) == 2 * EXPERTS  # and as many for gradients of inputs


def test_of_random_numbers_a_share_is_below_a_bound(rehearse):
    with rehearse() as recording:
        mask = torch.rand(4, 100, device="cuda") < 0.15
        assert mask.sum().item() == 60
        assert torch.randn(4, 100, 8, device="cuda")[mask].shape == (60, 8)
        assert (~mask).nonzero().shape == (340, 2)
        drawn = torch.bernoulli(torch.full((1000,), 0.3, device="cuda"))
        assert drawn.sum().item() == 300
        is_kept = torch.empty(10, device="cuda").bernoulli_(0.9).bool()
        assert is_kept.sum() == 9
        if torch.rand(1, device="cuda") < 0.2:  # layers are dropped: most are not
            raise AssertionError
    assert any("0.15 of random truths" in note for note in recording.notes)


def test_of_an_unknown_mask_all_is_true(rehearse):
    with rehearse() as recording:
        ids = torch.randint(0, 100, (4, 16), device="cuda")
        mask = ids != 1
        assert mask.sum().item() == len(ids[mask]) == 64
        assert mask.sum(1).tolist() == [16] * 4
    assert any("all of a mask are taken to be true" in note for note in recording.notes)


def test_what_is_known_is_chosen_by_its_values(rehearse):
    with rehearse() as recording:
        mask = torch.tensor([True, False, True], device="cuda")
        assert mask.nonzero().tolist() == [[0], [2]]
        assert torch.randn(3, 5, device="cuda")[mask].shape == (2, 5)
        assert torch.randn(3, device="cuda").masked_select(mask).shape == (2,)
        assert torch.randn(2, 3, device="cuda").masked_select(mask).shape == (4,)
        repeats = torch.tensor([2, 0, 3], device="cuda")
        x = torch.randn(3, device="cuda")
        assert x.repeat_interleave(repeats).shape == (5,)
        assert torch.equal(repeats, repeats.clone())
        assert not torch.equal(repeats, repeats + 1)
    assert recording.notes == []


def test_a_choice_of_a_size_that_is_told_reads_nothing(rehearse):
    with rehearse() as recording:
        repeats = torch.randint(3, (4,), device="cuda")
        rows = torch.randn(4, 5, device="cuda")
        rows.repeat_interleave(repeats, dim=0, output_size=6)
        assert recording.notes == []
        assert not any(isinstance(each, Synchronize) for each in recording.events)


def test_other_ranks_send_as_this_one_does(rehearse):
    """As experts on several ranks tell each other how many tokens they send."""
    with rehearse(size=4) as recording:
        dist.init_process_group("nccl")
        counts = torch.bincount(routed().view(-1), minlength=EXPERTS)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sizes = received.view(4, -1).sum(1).tolist()
        assert sizes == [TOKENS * 2 // 4] * 4
        tokens = torch.empty(sum(sizes), WIDTH, device="cuda")
        sent = torch.randn(TOKENS * 2, WIDTH, device="cuda")
        dist.all_to_all_single(tokens, sent, sizes, sizes)
        functional = torch.ops._c10d_functional
        group = dist.group.WORLD.group_name
        told = functional.all_gather_into_tensor(counts, 4, group)
        assert functional.wait_tensor(told).tolist() == EVEN * 4
        again = functional.all_to_all_single(counts, [2] * 4, [2] * 4, group)
        assert functional.wait_tensor(again).tolist() == EVEN
        dist.broadcast(counts, 0)
        assert counts.tolist() == EVEN
        dist.all_reduce(counts)
        assert counts.tolist() == [4 * each for each in EVEN]
        dist.destroy_process_group()
    assert any("other ranks are taken to send as" in note for note in recording.notes)
