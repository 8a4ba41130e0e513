"""Which traced steps are traced again to make them functional."""

import pytest
import torch
from step_models import MODELS, build
from torch import fx, nn
from torch._subclasses import fake_tensor
from training import train

from torchspmd.step import compile
from torchspmd.step.capture import functionalize


def values(model, optimizer, known):
    """What each output of a step computes: a number for each different expression."""
    ours, _ = build(model, optimizer)
    step = compile(train)
    for _ in range(2):
        step(*ours, torch.randn(6, 8))
    found = []
    for program in step.programs:
        numbers = {}
        for node in program.graph.graph.nodes:
            taken = fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)
            is_input = node.op in ("placeholder", "get_attr")
            what = (str(node.target), node.name if is_input else "", repr(taken))
            numbers[node] = known.setdefault(what, len(known))
        found.append(taken)
    return found


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [*((model, "adam_foreach") for model in MODELS), ("mlp", "momentum_fused")],
)
def test_rewriting_gives_the_graph_of_tracing_again(model, optimizer, monkeypatch):
    torch.manual_seed(0)
    known = {}
    quick = values(model, optimizer, known)
    monkeypatch.setattr(functionalize, "can_rewrite", lambda *_: False)
    assert values(model, optimizer, known) == quick


def rewrites(function, *args, monkeypatch):
    """Whether writes were rewritten; the result equals eager."""
    seen, can_rewrite = [], functionalize.can_rewrite

    def watch(*given):
        seen.append(can_rewrite(*given))
        return seen[-1]

    monkeypatch.setattr(functionalize, "can_rewrite", watch)
    clones = [each.clone() for each in args]
    got, expected = compile(function)(*clones), function(*args)
    assert torch.equal(got, expected)
    assert all(map(torch.equal, clones, args))
    return seen


def test_a_view_from_before_a_write(monkeypatch):
    def step(x):
        view = x.t()
        x.mul_(2)
        return view + 1

    assert rewrites(step, torch.randn(2, 3), monkeypatch=monkeypatch) == [False]


def test_a_view_that_is_written(monkeypatch):
    def step(x):
        row = x[0]
        row.add_(1)
        return x * 2

    assert rewrites(step, torch.randn(2, 3), monkeypatch=monkeypatch) == [False]


def test_a_view_that_is_done_with_before_the_write(monkeypatch):
    def step(x):
        doubled = x.t() * 2
        x.mul_(3)
        doubled.add_(1)
        return doubled

    assert rewrites(step, torch.randn(2, 3), monkeypatch=monkeypatch) == [True]


def test_a_write_by_name(monkeypatch):
    def step(x):
        view = x.t()
        torch.add(x, 1, out=x)
        return view * 2

    assert rewrites(step, torch.randn(2, 3), monkeypatch=monkeypatch) == [False]


@pytest.mark.parametrize("kind", ["Adagrad", "Adam", "AdamW", "SGD"])
def test_fused_updates_run_on_no_real_memory_during_a_capture(kind, monkeypatch):
    """Where a kernel for tensors without values is missing, torch makes all states."""

    def refuse(mode, operator, *args):
        raise AssertionError(f"{operator} runs on real tensors")

    monkeypatch.setattr(fake_tensor, "run_fallback_kernel", refuse)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    more = {"momentum": 0.9} if kind == "SGD" else {}
    optim = getattr(torch.optim, kind)(model.parameters(), lr=0.1, fused=True, **more)
    step = compile(train)
    for _ in range(2):
        assert step(model, optim, torch.randn(3, 4)).isfinite()
