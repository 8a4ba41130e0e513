"""Plain data of modules, arguments and classes: a change is seen, an equal value is not."""

import dataclasses
import enum
import functools
import gc
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from torchspmd.step import DataParallel, GraphModuleTransformation, compile, compiled
from torchspmd.step.capture.python_values import MAX_LEAVES
from torchspmd.testing import fake_world


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float = 1.0


class Kind(enum.Enum):
    ONE = 1.0
    TWO = 2.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale=1.0):
        self.scale = scale


def nested(scale=1.0):
    return types.SimpleNamespace(inner=types.SimpleNamespace(scales=[{"a": scale}]))


class Scaled(nn.Module):
    shared = 1.0

    def __init__(self, data=None, read=None):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.data, self.read = data, read

    def forward(self, x):
        scale = self.read(self.data) if self.read else self.shared
        return self.linear(x) * scale


def step(model, optim, batch, config=None):
    loss = model(batch).square().mean()
    if config is not None:
        loss = loss * config.scale
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def build(data=None, read=None):
    torch.manual_seed(0)
    model = Scaled(data, read)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def losses(function, change, data=None, read=None, config=None):
    """Six steps; the change is made before the fifth, behind the quick look."""
    model, optim = build(data, read)
    found = []
    for number in range(6):
        if number == 4:
            change(model if config is None else config)
        extra = () if config is None else (config,)
        found.append(function(model, optim, torch.ones(3, 4), *extra).item())
    return found


@pytest.fixture
def long_ways(monkeypatch):
    """How many calls went the long way."""
    taken = []
    take = compiled.take_inventory

    def counting(*args, **kwargs):
        taken.append(1)
        return take(*args, **kwargs)

    monkeypatch.setattr(compiled, "take_inventory", counting)
    return taken


def put(make):
    """Replace the data of a model."""
    return lambda model: setattr(model, "data", make())


def twice(self, x):
    return self.linear(x) * 2


CASES = {
    "dict": (lambda: {"a": 1.0}, lambda d: d["a"], lambda m: m.data.update(a=2.0)),
    "frozen": (Config, lambda d: d.scale, put(lambda: Config(2.0))),
    "enum": (lambda: Kind.ONE, lambda d: d.value, put(lambda: Kind.TWO)),
    "tuple": (lambda: ((1.0,),), lambda d: d[0][0], put(lambda: ((2.0,),))),
    "size": (lambda: torch.Size([1]), lambda d: d[0], put(lambda: torch.Size([2]))),
    "partial": (
        lambda: functools.partial(float, 1),
        lambda d: d(),
        put(lambda: functools.partial(float, 2)),
    ),
    "set": (lambda: {0}, lambda d: float(len(d)), lambda m: m.data.add(1)),
    "objects in a set": (
        lambda: {Slotted()},
        lambda d: next(iter(d)).scale,
        lambda m: setattr(next(iter(m.data)), "scale", 2.0),
    ),
    "number": (lambda: np.float32(1), float, put(lambda: np.float32(2))),
    "array": (lambda: np.ones(2), lambda d: float(d[0]), lambda m: m.data.fill(2)),
    "integer": (lambda: np.int64(1), float, put(lambda: np.int64(2))),
    "slots": (Slotted, lambda d: d.scale, lambda m: setattr(m.data, "scale", 2.0)),
    "deep": (
        nested,
        lambda d: d.inner.scales[0]["a"],
        lambda m: m.data.inner.scales[0].update(a=2.0),
    ),
    "forward": (
        lambda: None,
        lambda d: 1.0,
        lambda m: setattr(m, "forward", types.MethodType(twice, m)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name, long_ways):
    make, read, change = CASES[name]
    train = compile(step)
    found = losses(train, change, make(), read)
    assert found == losses(step, change, make(), read)
    assert len(train.programs) == 2
    assert len(long_ways) == 4  # two for each program: the quick look does the rest


def test_a_change_of_a_class_is_seen(monkeypatch):
    def change(model):
        monkeypatch.setattr(Scaled, "shared", 2.0)

    expected = losses(step, change)
    monkeypatch.undo()
    train = compile(step)
    assert losses(train, change) == expected
    assert "class Scaled.shared: 1.0 -> 2.0" in train.programs[1].reason


def test_a_change_of_an_argument_is_seen(long_ways):
    def change(config):
        config.inner.scale = config.scale = 2.0

    def config():
        return types.SimpleNamespace(scale=1.0, inner=types.SimpleNamespace(scale=1.0))

    train = compile(step)
    assert losses(train, change, config=config()) == losses(
        step, change, config=config()
    )
    assert "args[3].inner.scale: 1.0 -> 2.0" in train.programs[1].reason
    assert len(long_ways) == 4


def test_an_equal_value_needs_no_program():
    train = compile(step)
    losses(train, put(nested), nested(), lambda d: d.inner.scales[0]["a"])
    assert len(train.programs) == 1


def test_one_and_one_point_zero_differ():
    train = compile(step)
    losses(train, put(lambda: 1), 1.0, lambda d: d)
    assert len(train.programs) == 2


def test_what_points_back_ends():
    data = types.SimpleNamespace(scale=1.0)
    data.itself = [data]
    model, optim = build(data, lambda d: d.scale)
    data.model, data.lock = model, object()
    train = compile(step)
    for _ in range(3):
        train(model, optim, torch.ones(3, 4))
    assert len(train.programs) == 1
    data.scale = 2.0
    train(model, optim, torch.ones(3, 4))
    assert "Scaled.data.scale: 1.0 -> 2.0" in train.programs[1].reason


def test_what_is_beyond_is_listed_once():
    train = compile(step)
    data = [*range(MAX_LEAVES), object]
    losses(train, lambda m: None, data, lambda d: 1.0)
    (line,) = [line for line in train.explain().splitlines() if "not guarded" in line]
    assert "beyond 512 values or 6 levels: Scaled.data; if one changes" in line


def test_what_stands_for_an_pending_update_is_no_change(long_ways):
    with fake_world(2):
        model, optim = build(Config(), lambda d: d.scale)
        model.forward = types.MethodType(twice, model)  # stays the user's own
        transformation = GraphModuleTransformation(
            enable_graph_optimization=True, overlap_iterations=True
        )
        train = compile(
            parallel_mode=DataParallel("replicate"), gm_transformation=transformation
        )(step)
        with train:
            for number in range(12):
                train(model, optim, torch.ones(3, 4))
                if number == 6:
                    train.flush()
            assert len(train.programs) == 1
            assert "forward" in vars(model)
            assert len(long_ways) < 8


class Trainer:
    """Holds the model that holds it, and counts."""

    def __init__(self, model):
        self.loop = types.SimpleNamespace(models=[model], count=0)


def test_what_drives_a_model_is_no_data_of_it():
    model = Scaled()
    model.trainer = Trainer(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled_step = compile(step)
    for _ in range(4):
        compiled_step(model, optim, torch.ones(2, 4))
        model.trainer.loop.count += 1
    assert len(compiled_step.programs) == 1
    model.trainer = Trainer(model)  # the code names nothing of it
    compiled_step(model, optim, torch.ones(2, 4))
    assert len(compiled_step.programs) == 1


@dataclasses.dataclass
class State:
    """Has no hash, and holds the model."""

    model: nn.Module
    scale: float = 1.0
    steps: int = 0
    rows: torch.Tensor = None


def test_an_argument_that_holds_a_model_is_guarded_by_what_the_code_names():
    def train(state, optim):
        loss = state.model(state.rows).square().mean() * state.scale
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    torch.manual_seed(0)
    states = [State(nn.Linear(4, 4)) for _ in range(2)]
    states[1].model.load_state_dict(states[0].model.state_dict())
    optims = [torch.optim.SGD(s.model.parameters(), lr=0.1) for s in states]
    steps = [compile(train, shadow=0), train]
    for number in range(8):
        rows = torch.randn(2, 4)
        for state in states:
            state.steps, state.rows = number, rows
            state.scale = 1.0 if number < 4 else 0.5
        losses = [f(s, o) for f, s, o in zip(steps, states, optims, strict=True)]
        assert torch.equal(*losses)
    assert len(steps[0].programs) == 2


def test_what_drives_a_model_is_not_kept_alive():
    model = Scaled()
    model.trainer = Trainer(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled_step = compile(step)
    compiled_step(model, optim, torch.ones(2, 4))
    compiled_step(model, optim, torch.ones(2, 4))
    gone = weakref.ref(model)
    del model, optim
    gc.collect()
    assert gone() is None


FIRST, SECOND = 1.0, 1.0


def second():
    return SECOND


def two_globals(model, optim, batch):
    return step(model, optim, batch * FIRST * second())


@pytest.mark.parametrize("name", ("FIRST", "SECOND"))
def test_globals_of_two_functions_of_one_file(name, monkeypatch):
    model, optim = build()
    train = compile(two_globals)
    for _ in range(3):
        train(model, optim, torch.ones(3, 4))
    monkeypatch.setitem(globals(), name, 2.0)
    train(model, optim, torch.ones(3, 4))
    assert f"{name}: 1.0 -> 2.0" in train.programs[1].reason


class Node:
    def __init__(self, children=()):
        self.scale, self.children = 1.0, list(children)


def test_a_large_tree_of_objects_is_looked_at_in_part():
    tree = Node(Node(Node() for _ in range(10)) for _ in range(500))

    def reads_a_tree(model, optim, batch):
        return step(model, optim, batch * tree.scale)

    model, optim = build()
    train = compile(reads_a_tree)
    for _ in range(2):
        train(model, optim, torch.ones(3, 4))
    tree.scale = 2.0
    train(model, optim, torch.ones(3, 4))
    assert "tree around reads_a_tree.scale: 1.0 -> 2.0" in train.programs[1].reason
    assert "not guarded" not in train.explain()  # no line names the children

    def reads_children(model, optim, batch):
        return step(model, optim, batch * len(tree.children))

    train = compile(reads_children)
    train(model, optim, torch.ones(3, 4))
    assert "tree around reads_children.children" in train.explain()
