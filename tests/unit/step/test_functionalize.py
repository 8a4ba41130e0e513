"""Which part of a traced step is traced again to make it functional."""

import pytest
import torch
from step_models import MODELS, build
from training import train

from torchspmd.step import compile
from torchspmd.step.capture import functionalize

pytestmark = pytest.mark.unit


def operators(model, optimizer):
    """The operators of a first and a second step, and where their values come from."""
    ours, _ = build(model, optimizer)
    step = compile(train)
    for _ in range(2):
        step(*ours, torch.randn(6, 8))
    found = []
    for program in step.programs:
        place = {node: index for index, node in enumerate(program.graph.graph.nodes)}
        found += [
            (str(node.target), [place[source] for source in node.all_input_nodes])
            for node in program.graph.graph.nodes
            if node.op not in ("placeholder", "get_attr")
        ]
    return found


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [*((model, "adam_foreach") for model in MODELS), ("mlp", "momentum_fused")],
)
def test_taking_nodes_over_gives_the_same_graph(model, optimizer, monkeypatch):
    torch.manual_seed(0)
    quick = operators(model, optimizer)
    monkeypatch.setattr(functionalize, "_can_cut", lambda *_: False)
    assert operators(model, optimizer) == quick


def cuts(function, *args, monkeypatch):
    """Whether nodes were taken over; the result equals eager."""
    seen, can_cut = [], functionalize._can_cut

    def watch(*given):
        seen.append(can_cut(*given))
        return seen[-1]

    monkeypatch.setattr(functionalize, "_can_cut", watch)
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

    assert cuts(step, torch.randn(2, 3), monkeypatch=monkeypatch) == [False]


def test_a_view_that_is_written(monkeypatch):
    def step(x):
        row = x[0]
        row.add_(1)
        return x * 2

    assert cuts(step, torch.randn(2, 3), monkeypatch=monkeypatch) == [False]


def test_a_view_that_is_done_with_before_the_write(monkeypatch):
    def step(x):
        doubled = x.t() * 2
        x.mul_(3)
        doubled.add_(1)
        return doubled

    assert cuts(step, torch.randn(2, 3), monkeypatch=monkeypatch) == [True]


def test_a_write_by_name(monkeypatch):
    def step(x):
        view = x.t()
        torch.add(x, 1, out=x)
        return view * 2

    assert cuts(step, torch.randn(2, 3), monkeypatch=monkeypatch) == [False]
