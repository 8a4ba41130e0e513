"""New values in the memory of the old ones: what is converted, what not, the same bits."""

import copy
import operator
import random

import pytest
import torch
from _memory import MemoryCounter
from step_models import build, difference
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchspmd.step import compile
from torchspmd.step.graph.memory import predict_peak
from torchspmd.step.lower.in_place import compute_in_place

pytestmark = pytest.mark.unit

aten = torch.ops.aten


class Build:
    """A graph whose nodes know their fake values."""

    def __init__(self):
        self.graph, self.mode = fx.Graph(), FakeTensorMode()

    def input(self, *shape):
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def call(self, target, *args, **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def finish(self, outputs, written):
        """The report, and whether the edited graph gives the same values."""
        self.graph.output(outputs)
        before = fx.GraphModule(nn.Module(), copy.deepcopy(self.graph))
        report = compute_in_place(self.graph, written)
        after = fx.GraphModule(nn.Module(), self.graph)
        torch.manual_seed(0)
        inputs = [
            torch.randn(node.meta["val"].shape)
            for node in self.graph.find_nodes(op="placeholder")
        ]
        expected = before(*[each.clone() for each in inputs])
        given = [each.clone() for each in inputs]
        got = after(*given)
        places = list(self.graph.find_nodes(op="placeholder"))
        touched = [place for place in written.values() if place in places]
        for place, old, new in zip(places, inputs, given, strict=True):
            if place not in touched:
                assert torch.equal(old, new), f"{place} was written"
        assert all(map(torch.equal, got, expected))
        names = [str(node.target) for node in self.graph.nodes]
        return report, names


def test_a_chain_of_elementwise_operators():
    b = Build()
    p, g = b.input(4, 3), b.input(4, 3)
    v = b.call(aten.addcmul.default, b.call(aten.mul.Tensor, p, 0.9), g, g, value=0.1)
    report, names = b.finish([v], {v: p})
    assert (report.num_in_place, report.copied, report.left) == (1, (), ())
    assert "aten.mul_.Tensor" in names and "aten.addcmul_.default" in names
    assert str(report).startswith("new values: 1 computed in place")


def test_an_old_value_that_is_read_later_through_a_view():
    b = Build()
    p, g = b.input(4, 4), b.input(4, 4)
    view = b.call(aten.t.default, p)
    v = b.call(aten.add.Tensor, p, g)
    late = b.call(aten.mm.default, view, g)
    report, names = b.finish([v, late], {v: p})
    assert report.num_in_place == 0
    assert report.copied == (("x0", "x0 is read later"),)
    assert names.index("aten.copy_.default") > names.index("aten.mm.default")


def test_an_old_value_that_is_returned():
    b = Build()
    p, g = b.input(3), b.input(3)
    v = b.call(aten.add.Tensor, p, g)
    report, _ = b.finish([v, p], {v: p})
    assert report.left == (("x0", "its old value is returned"),)


def test_two_states_that_change_places():
    b = Build()
    p, q = b.input(3), b.input(3)
    report, _ = b.finish([q, p], {q: p, p: q})
    assert [reason for _, reason in report.left] == [
        "its new value is another input, or a constant"
    ] * 2


def test_a_chain_that_is_not_the_inputs_own():
    b = Build()
    p, q = b.input(3), b.input(3)
    v = b.call(aten.add.Tensor, q, p)  # begins at q, which nobody writes
    report, _ = b.finish([v], {v: p})
    (reason,) = [reason for _, reason in report.copied]
    assert "does not begin at its old value" in reason


def test_shapes_dtypes_and_arguments_that_forbid_it():
    b = Build()
    p = b.input(3, 3)
    turned = b.call(aten.add.Tensor, p, b.call(aten.t.default, p))
    report, _ = b.finish([turned], {turned: p})
    assert report.copied[0][1] == "x0 is read through another argument too"
    b = Build()
    p, g = b.input(1, 3), b.input(4, 3)
    wide = b.call(aten.mul.Tensor, b.call(aten.expand.default, p, [4, 3]), 2.0)
    report, _ = b.finish([b.call(aten.add.Tensor, wide, g)], {})
    assert report.num_temporaries == 1  # not on what is expanded


def test_lists_all_or_none():
    b = Build()
    p, q, g = b.input(3), b.input(3), b.input(3)
    new = b.call(aten._foreach_add.List, [p, q], [g, g])
    values = [b.call(operator.getitem, new, n) for n in range(2)]
    report, names = b.finish(values, {values[0]: p, values[1]: q})
    assert report.num_in_place == 2 and "aten._foreach_add_.List" in names
    b = Build()
    p, q, g = b.input(3), b.input(3), b.input(3)
    new = b.call(aten._foreach_add.List, [p, q], [g, p])  # p is read for q's value
    values = [b.call(operator.getitem, new, n) for n in range(2)]
    report, names = b.finish(values, {values[0]: p, values[1]: q})
    assert report.num_in_place == 0 and len(report.copied) == 2


def draw(seed):
    """A graph of elementwise operators and views with two states."""
    rng, b = random.Random(seed), Build()
    inputs = [b.input(3, 3) for _ in range(3)]
    values = list(inputs)
    for _ in range(rng.randint(3, 12)):
        x, y = rng.choices(values, k=2)
        kind = rng.choice(["add", "mul", "relu", "t", "view", "lerp", "mm", "where"])
        if kind in ("add", "mul"):
            values.append(b.call(getattr(aten, kind).Tensor, x, y))
        elif kind == "relu":
            values.append(b.call(aten.relu.default, x))
        elif kind == "t":
            values.append(b.call(aten.t.default, x))
        elif kind == "view":
            values.append(b.call(aten.slice.Tensor, x, 0, 0, 3))
        elif kind == "lerp":
            values.append(b.call(aten.lerp.Scalar, x, y, 0.3))
        elif kind == "mm":
            values.append(b.call(aten.mm.default, x, y))
        else:
            below = b.call(aten.gt.Tensor, x, y)
            values.append(b.call(aten.where.self, below, x, y))
    ends = rng.sample(values[3:], 2)
    extra = rng.choices(values, k=rng.randint(0, 2))
    return b, [*ends, *extra], dict(zip(ends, inputs, strict=False))


def test_drawn_graphs_keep_their_values():
    converted = 0
    for seed in range(300):
        b, outputs, written = draw(seed)
        report, _ = b.finish(outputs, written)
        converted += report.num_in_place
    assert converted > 20


def test_swapped_buffers_are_written_back_right():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("one", torch.zeros(2))
            self.register_buffer("two", torch.ones(2))

        def forward(self, x):
            self.one, self.two = self.two, self.one
            return x + self.one

    model = Pair()
    step = compile(lambda model, x: model(x))
    step(model, torch.zeros(2))
    assert model.one.tolist() == [1, 1] and model.two.tolist() == [0, 0]


@pytest.mark.parametrize("optimizer", ["momentum", "adam_foreach", "adamw_fused"])
def test_states_of_a_step_are_written_in_place(optimizer):
    def train(model, optim, batch):
        optim.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optim.step()
        return loss.detach()

    ours, reference = build("mlp", optimizer)
    step = compile(train)
    for _ in range(3):
        batch = torch.randn(6, 8)
        step(*ours, batch)
        train(*reference, batch)
    assert difference(ours, reference) == 0.0
    program = step.programs[-1]
    assert program.in_place.num_in_place >= 8 and program.in_place.left == ()
    assert "computed in place" in step.explain() and "memory: " in step.explain()
    counters = []
    for function, (model, optim) in ((train, reference), (step, ours)):
        states = [t for s in optim.state.values() for t in s.values()]
        held = [p.grad for p in model.parameters()]
        batch = torch.randn(6, 8)
        counters.append(MemoryCounter([*model.parameters(), *states, *held, batch]))
        del held  # the step replaces the gradients: nothing may keep the old ones
        with counters[-1]:
            function(model, optim, batch)
    eager, compiled = (counter.peak_bytes for counter in counters)
    assert compiled <= 1.03 * eager
    assert program.peak_memory.total_bytes == compiled
    assert program.peak_memory.alive["parameter"] == 4 * sum(
        p.numel() for p in ours[0].parameters()
    )


def test_a_returned_state_is_the_users_own_memory():
    def train(model, optim, batch):
        model(batch).sum().backward()
        optim.step()
        optim.zero_grad()
        return model[0].weight, model[0].weight.clone(), model[0].bias.detach() + 0.0

    ours, reference = build("mlp", "momentum")
    step = compile(train)
    for _ in range(2):
        batch = torch.randn(6, 8)
        got, expected = step(*ours, batch), train(*reference, batch)
        assert all(map(torch.equal, got, expected))
    assert got[0].data_ptr() == ours[0][0].weight.data_ptr()
    assert got[1].data_ptr() != got[0].data_ptr()
    assert not any(each.requires_grad for each in got)


def test_an_average_that_follows_the_updated_weights():
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4, 4))

        def forward(self, x):
            return self.linear(x)

    def train(model, optim, batch):
        model(batch).square().sum().backward()
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            model.mean.lerp_(model.linear.weight, 0.1)
            return (model.mean @ model.mean.t()).sum()

    torch.manual_seed(0)
    ours, reference = (Averaged() for _ in range(2))
    reference.load_state_dict(ours.state_dict())
    optims = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (ours, reference)]
    step = compile(train)
    for _ in range(3):
        batch = torch.randn(2, 4)
        got = step(ours, optims[0], batch)
        assert torch.equal(got, train(reference, optims[1], batch))
    assert torch.equal(ours.mean, reference.mean)
    assert step.programs[0].in_place.num_in_place == 3


def test_without_it_a_step_needs_more():
    def own_callable(gm):
        return gm.forward  # a callable, but not a graph

    def train(model, optim, batch):
        model(batch).sum().backward()
        optim.step()
        optim.zero_grad()

    peaks = {}
    for name, transformation in (("in place", None), ("functional", own_callable)):
        model = nn.Linear(64, 64)
        optim = torch.optim.Adam(model.parameters(), fused=True)
        step = compile(gm_transformation=transformation)(train)
        for _ in range(2):
            step(model, optim, torch.ones(2, 64))
        states = [t for s in optim.state.values() for t in s.values()]
        counter = MemoryCounter([*model.parameters(), *states])
        with counter:
            step(model, optim, torch.ones(2, 64))
        peaks[name] = counter.peak_bytes
    assert peaks["functional"] > 1.5 * peaks["in place"]
    assert step.programs[-1].peak_memory is None  # the callable is not a graph


def test_a_prediction_by_hand():
    b = Build()
    x = b.input(256)
    y = b.call(aten.add.Tensor, x, 1.0)
    z = b.call(aten.mm.default, *[b.call(aten.view.default, y, [16, 16])] * 2)
    b.graph.output([b.call(aten.sum.default, z)])
    peak = predict_peak(b.graph)
    assert peak.total_bytes == 3 * 1024
    assert peak.node == "mm_default"
    assert dict(peak.alive) == {"input": 1024, "activation": 2048}
    assert predict_peak(b.graph, frozenset({0})).total_bytes == 2 * 1024
