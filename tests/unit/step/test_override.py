"""Stand-ins for modules: who is offered, what is captured, what stays as it was."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from training import train as step

from torchspmd.errors import CaptureError, UsageError
from torchspmd.step import Override, compile


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def net():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


class Fused(nn.Module):
    """The same block on the same parameters, another activation."""

    def __init__(self, block):
        super().__init__()
        self.up, self.weight, self.bias = block.up, block.down.weight, block.down.bias

    def forward(self, x):
        return nn.functional.linear(torch.tanh(self.up(x)), self.weight, self.bias)


class Replace(Override):
    def __init__(self, select=None, stand_in=Fused):
        super().__init__(select)
        self.offered, self.stand_in = [], stand_in

    def replacement(self, fqn, orig_submodule):
        self.offered.append(fqn)
        return self.stand_in(orig_submodule)


def leave(module):
    return module


def train(model, steps=3, **options):
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    compiled = compile(**options)(step)
    for number in range(steps):
        torch.manual_seed(number)
        compiled(model, optim, torch.randn(4, 8))
    return compiled


@pytest.mark.parametrize(
    ("select", "names"),
    [
        (None, ["", "0", "0.up", "0.down", "1", "1.up", "1.down"]),
        ("?.up", ["0.up", "1.up"]),
        (Block, ["0", "1"]),
        ("", [""]),
        (lambda name, module: name.endswith("down"), ["0.down", "1.down"]),
    ],
)
def test_selections(select, names):
    override = Override(select)
    chosen = [n for n, m in net().named_modules() if override.selects(n, m)]
    assert chosen == names


@pytest.mark.parametrize("select", ["*", Block])
def test_stand_ins_are_captured_and_the_model_is_trained(select):
    def choose(module):
        return Fused(module) if isinstance(module, Block) else module

    model = net()
    reference = copy.deepcopy(model)
    before = list(model.named_modules())
    compiled = train(model, module_override=[Replace(select, choose)])
    assert "aten.tanh" in compiled.programs[-1].code
    assert "aten.relu" not in compiled.programs[-1].code
    assert list(model.named_modules()) == before
    assert list(model.state_dict()) == list(reference.state_dict())
    for place in range(2):
        reference[place] = Fused(reference[place])
    optim = torch.optim.Adam(reference.parameters(), lr=0.01)
    for number in range(3):
        torch.manual_seed(number)
        step(reference, optim, torch.randn(4, 8))
    ours = model(torch.ones(1, 8)), model[0].up.weight
    assert torch.equal(ours[1], reference[0].up.weight)
    assert len(compiled.programs) == 1


def test_every_module_is_offered_once_to_each():
    first, second = Replace(stand_in=leave), Replace(nn.Linear, leave)
    train(net(), module_override=[first, second])
    names = ["", "0", "0.up", "0.down", "1", "1.up", "1.down"]
    assert first.offered == names
    assert second.offered == [name for name in names if "." in name]


def test_children_of_a_stand_in_are_not_offered():
    seen = Replace(stand_in=leave)
    train(net(), module_override=[Replace("0"), seen])
    assert seen.offered == ["", "1", "1.up", "1.down"]


def test_the_model_itself():
    class Scaled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * 3.0

    model = net()
    compiled = train(model, module_override=[Replace("", Scaled)])
    assert "3.0" in compiled.programs[-1].code
    assert len(compiled.programs) == 1


class Anchored(Override):
    """Finds the stand-in's operator in the graph and writes another in its place."""

    def __init__(self):
        super().__init__(nn.Identity)
        self.state = []

    def replacement(self, fqn, orig_submodule):
        return nn.Hardtanh()

    def transform(self, gm, flat_state):
        self.state.append(flat_state)
        (anchor,) = gm.graph.find_nodes(
            op="call_function", target=torch.ops.aten.hardtanh.default
        )
        with gm.graph.inserting_before(anchor):
            new = gm.graph.call_function(torch.ops.aten.neg.default, anchor.args[:1])
        new.meta = anchor.meta
        anchor.replace_all_uses_with(new)
        gm.graph.erase_node(anchor)
        return gm


def test_transform_edits_the_graph():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    override = Anchored()

    @compile(module_override=[override])
    def forward(model, batch):
        with torch.no_grad():
            return model(batch)

    batch = torch.randn(2, 4)
    assert torch.equal(forward(model, batch), -model[0](batch).detach())
    assert override.state[0][0] is model[0].weight


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ([Replace("blocks.*")], UsageError, "matches no module of Sequential"),
        ([Replace("0.upp")], UsageError, "Did you mean 0.up"),
        ([Replace("0", lambda m: 3)], UsageError, r"replacement\('0'\) returned int"),
        ([Block()], UsageError, "Block is no Override"),
    ],
)
def test_refusals(options, error, text):
    with pytest.raises(error, match=text):
        train(net(), module_override=options)


def test_a_transform_that_changes_the_interface():
    class Drops(Override):
        def transform(self, gm, flat_state):
            output = gm.graph.output_node()
            output.args = (output.args[0][:-1],)
            return gm

    class Nothing(Override):
        def transform(self, gm, flat_state):
            return None

    with pytest.raises(CaptureError, match="the number of its outputs"):
        train(net(), module_override=[Drops()])
    with pytest.raises(CaptureError, match="transform returned NoneType"):
        train(net(), module_override=[Nothing()])


def test_a_swapped_child_is_offered_again_and_nothing_is_kept():
    model = net()
    override = Replace("0")
    compiled = train(model, steps=2, module_override=[override])
    model[0] = Block()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(model, optim, torch.randn(4, 8))
    assert override.offered == ["0", "0"]
    watched = weakref.ref(model)
    del model, optim
    gc.collect()
    assert watched() is None
