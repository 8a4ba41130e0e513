"""Optimizers over many parameters, taken apart by gradient."""

from operator import getitem

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training import train_silently

from torchspmd.errors import UnsupportedPassError, UsageError
from torchspmd.step import IterGraphModule, compile, get_all_fused_optimizer_blocks
from torchspmd.step.graph.optimizer_lists import (
    Chains,
    gradients_of,
    is_list_operator,
    num_items,
)
from torchspmd.step.passes import split_fused_optimizer, split_optimizer

FUSED = {
    "_fused_adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "_fused_adam amsgrad": lambda p: torch.optim.Adam(
        p, lr=0.01, fused=True, amsgrad=True
    ),
    "_fused_adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "_fused_adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "_fused_sgd": lambda p: torch.optim.SGD(p, lr=0.01, fused=True, momentum=0.9),
}
FOREACH = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, foreach=True, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, foreach=True),
}


def train(make_optimizer, transformation=None, count=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optim = make_optimizer(model.parameters())

    step = train_silently
    if transformation is not None:
        step = compile(step, gm_transformation=transformation)
    for _ in range(count):
        step(model, optim, torch.ones(2, 4))
    return list(model.parameters()), optim.state_dict()["state"]


def assert_equal(one, other):
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert torch.equal(mine, theirs)
    for number, entries in other[1].items():
        for key, value in entries.items():
            assert torch.equal(one[1][number][key], value), (number, key)


@pytest.mark.parametrize("name", FUSED)
def test_halves_write_in_place_as_the_whole_did(name):
    """Each list of results is taken once, as an operator that writes them needs it."""

    def transformation(gm):
        (block,) = get_all_fused_optimizer_blocks(gm, name.partition(" ")[0])
        gradients = gradients_of(block.optim.optim_node)
        for half in split_fused_optimizer(gm, block, gradients[1:3]):
            taken = [user.args[1] for user in half.optim.optim_node.users]
            assert len(taken) == len(set(taken)) > 0
        return gm

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optim = FUSED[name](model.parameters())

    step = compile(train_silently, gm_transformation=transformation)
    for _ in range(2):
        step(model, optim, torch.ones(2, 4))
    assert step.programs[-1].in_place.copied == ()


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_in_three(name):
    prefix = name.partition(" ")[0]
    seen = []

    def transformation(gm):
        gm = IterGraphModule(gm)
        (block,) = get_all_fused_optimizer_blocks(gm, prefix)
        gradients = gradients_of(block.optim.optim_node)
        first, rest = split_fused_optimizer(gm, block, gradients[1:3])
        assert gradients_of(first.optim.optim_node) == gradients[1:3]
        assert gradients_of(rest.optim.optim_node) == (gradients[0], gradients[3])
        if prefix == "_fused_sgd":  # it has no counters
            assert first.step.add_node is rest.step.add_node is None
        else:
            assert first.step.add_node is not rest.step.add_node
        split_fused_optimizer(gm, rest, [gradients[3]])
        blocks = get_all_fused_optimizer_blocks(gm, prefix)
        seen.append([num_items(block.optim.optim_node) for block in blocks])
        return gm

    assert_equal(train(FUSED[name], transformation), train(FUSED[name]))
    assert [sorted(each) for each in seen] == [[1, 1, 2]]


@pytest.mark.parametrize("name", FOREACH)
def test_a_foreach_optimizer_in_two(name):
    seen = []

    def transformation(gm):
        gm = IterGraphModule(gm)
        before = Chains(gm.graph).operators
        bias = next(n for n in gm.graph.nodes if n.name == "view")
        report = split_optimizer(gm, [bias])
        # A step counter that no update reads is in no gradient's chain.
        counters = 1 if name == "rmsprop" else 0
        assert report.outcome.changed == len(before) - counters > 0
        after = [n for n in gm.graph.nodes if is_list_operator(n)]
        assert len(after) == 2 * len(before) - counters
        seen.append({num_items(node) for node in after})
        return gm

    assert_equal(train(FOREACH[name], transformation), train(FOREACH[name]))
    assert all({1, 3} <= each for each in seen)


@pytest.mark.parametrize("chosen", [(0,), (0, 1), (2,), (0, 2)])
def test_numbers_in_one_tensor_are_taken_apart_too(chosen):
    """Step sizes that are tensors go into the operator as one."""
    with FakeTensorMode():
        fakes = [torch.empty(2) for _ in range(6)] + [torch.empty(3)]
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("p", "q", "r", "g", "h", "i", "s")]
    for node, fake in zip(nodes, fakes, strict=True):
        node.meta["val"] = fake
    params, grads, numbers = nodes[:3], nodes[3:6], nodes[6]
    operator = torch.ops.aten._foreach_addcmul.Tensor
    made = graph.call_function(operator, (params, grads, grads, numbers))
    made.meta["val"] = fakes[:3]
    items = [graph.call_function(getitem, (made, i)) for i in range(3)]
    for item in items:
        item.meta["val"] = fakes[0]
    graph.output(items)
    gm = fx.GraphModule({}, graph)
    inputs = [torch.full((2,), float(n)) for n in range(6)] + [torch.arange(3.0)]
    before = gm(*inputs)
    report = split_optimizer(gm, [grads[i] for i in chosen])
    assert report.outcome.changed == 1 and report.proof == "proved equal"
    assert all(map(torch.equal, gm(*inputs), before))


def test_wrong_splits_are_refused():
    def transformation(gm):
        gm = IterGraphModule(gm)
        (block,) = get_all_fused_optimizer_blocks(gm, "_fused_adam")
        gradients = gradients_of(block.optim.optim_node)
        count = len(gm.graph.nodes)
        with pytest.raises(ValueError, match="The given split_gradients is empty"):
            split_fused_optimizer(gm, block, [])
        with pytest.raises(ValueError, match="At least one split optimizer does not"):
            split_fused_optimizer(gm, block, gradients)
        stranger = next(iter(gm.graph.nodes))
        with pytest.raises(UsageError, match="are no gradients of _fused_adam"):
            split_fused_optimizer(gm, block, [stranger])
        other = type(block.optim)(stranger, ())
        with pytest.raises(UnsupportedPassError, match="Only fused_adam, fused_adamw"):
            split_fused_optimizer(gm, type(block)(block.step, other), gradients)
        assert len(gm.graph.nodes) == count
        return gm

    train(FUSED["_fused_adam"], transformation, count=1)
