"""Methods and modules in a graph may hand out the memory of what they take."""

import pytest
import torch
from torch import nn

from torchspmd.errors import PassWarning
from torchspmd.step import compile

pytestmark = pytest.mark.unit

aten = torch.ops.aten


def read_late(kind):
    """Reads the old weight behind its update, through what may be a view of it."""

    def read(gm):
        (total,) = gm.graph.find_nodes(op="call_function", target=aten.sum.default)
        weight = total.args[0]
        with gm.graph.inserting_before(total):
            if kind == "method":
                kept = gm.graph.call_method("detach", (weight,))
            else:
                gm.add_submodule("idle", nn.Identity())
                kept = gm.graph.call_module("idle", (weight,))
        with gm.graph.inserting_before(gm.graph.output_node()):
            late = gm.graph.call_function(aten.sum.default, (kept,))
        late.meta = dict(total.meta)
        total.replace_all_uses_with(late)
        gm.graph.erase_node(total)
        gm.recompile()
        return gm

    return read


def step(model, optim, batch):
    before = model.weight.detach().sum()
    (model(batch) ** 2).mean().backward()
    optim.step()
    optim.zero_grad()
    return before


def results(run):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    return [run(model, optim, torch.ones(2, 4)).item() for _ in range(3)]


@pytest.mark.parametrize("kind", ["method", "module"])
def test_what_is_read_late_is_the_old_value(kind):
    with pytest.warns(PassWarning, match="could not be proved"):
        found = results(compile(step, gm_transformation=read_late(kind)))
    assert found == results(step)
