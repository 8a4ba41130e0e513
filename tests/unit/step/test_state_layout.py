"""States whose elements do not lie side by side: a new value is read as it is held.

``as_strided`` reads what the strides say, so that its values tell the layout; a matrix
product only chooses its kernel by them, and differs in the last bits.
"""

import pytest
import torch
from torch import fx

from torchspmd.errors import VerificationError
from torchspmd.step import Verification, run_virtual
from torchspmd.step.deferral import forms
from torchspmd.step.deferral.iter_graph import IterGraph
from torchspmd.step.deferral.module import IterGraphModule, Marks
from torchspmd.step.graph.metadata import OutputKind, OutputRole, set_roles
from torchspmd.step.lower.deferred_in_place import write_pending_in_place
from torchspmd.step.virtual.ranks import lay_out
from torchspmd.step.virtual.run import Inputs, without_marks
from torchspmd.step.virtual.verify import Verifier

pytestmark = pytest.mark.unit

aten = torch.ops.aten
MOVED = "work moved to the next iteration (regions: 1)"


def spread():
    return torch.arange(16.0).reshape(2, 8)[:, ::2]


def iteration():
    """`w` is read by its strides, then `w -= g`, where `g` comes of what was read."""
    graph = fx.Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    read = graph.call_function(aten.as_strided.default, (w, [4], [2]))
    g = graph.call_function(aten.mul.Tensor, (read, x))
    new = graph.call_function(aten.sub.Tensor, (w, g))
    for node, value in zip(
        graph.nodes,
        (spread(), torch.ones(4), torch.ones(4), torch.ones(4), torch.ones(2, 4)),
        strict=True,
    ):
        node.meta["val"] = value
    read.meta["val"] = aten.as_strided.default(w.meta["val"], [4], [2])
    graph.output([new, g])
    set_roles(graph, [OutputRole(OutputKind.STATE, 0), OutputRole(OutputKind.RESULT)])
    module = IterGraphModule(fx.GraphModule({}, graph))
    moved = {node.name: node for node in module.graph.nodes}
    module.graph.move_to_next_iter_before([moved[new.name]], moved[read.name])
    return module


def call():
    return [spread(), torch.tensor([1.0, 0.5, 2.0, 3.0])]


def verifier(module):
    return Verifier("step", module.main_gm, call(), Verification())


def steady_in_place(module, marks):
    derived = forms.derive(module.graph, module.graph.regions)
    form = fx.GraphModule({}, derived.steady.graph)
    return write_pending_in_place(form, marks, {})


def test_what_was_pending_is_read_in_the_layout_of_its_state():
    module = iteration()
    assert isinstance(module.graph, IterGraph)
    module.finalize_setup()
    state, x = call()
    expected, _ = call()
    for step in range(4):
        read = expected.as_strided([4], [2]) * x
        expected.sub_(read)
        new, found = module(state, x, last_iter=step == 3)
        assert torch.equal(found, read)
        if new is not None:
            state.copy_(new)
    assert torch.equal(state, expected)


def test_the_pending_update_is_still_made_in_place():
    running, report = steady_in_place(iteration(), Marks(print, repr))
    assert report.in_place == {0} and not report.left
    (copy,) = running.graph.find_nodes(op="call_function", target=aten.copy_.default)
    (read,) = running.graph.find_nodes(
        op="call_function", target=aten.as_strided.default
    )
    assert copy.args[0] is read.args[0] and read.args[0].name == "w"


def test_a_form_that_reads_another_layout_is_found(monkeypatch):
    module = iteration()
    checking = verifier(module)
    checking.compare_pipelined(module.graph)
    assert [(check.what, check.result) for check in checking.checks] == [
        (MOVED, "equal bits")
    ]
    monkeypatch.setattr(forms, "_same_layout", lambda held, fresh: True)
    with pytest.raises(VerificationError) as caught:
        checking.compare_pipelined(module.graph)
    assert f"{MOVED} changed what 4 steps compute" in str(caught.value)


def test_the_form_that_is_run_is_compared():
    module, marks = iteration(), Marks(print, repr)
    running, _ = steady_in_place(module, marks)
    steady = without_marks(running.graph, marks)
    assert len(running.graph.nodes) == len(steady.nodes) + 2
    checking = verifier(module)
    checking.compare_pipelined(module.graph, {"steady": steady})
    what = f"{MOVED}, steady form in place"
    assert [check.what for check in checking.checks] == [MOVED, what]
    (update,) = steady.find_nodes(op="call_function", target=aten.copy_.default)
    steady.erase_node(update)  # the state keeps its old value
    with pytest.raises(VerificationError) as caught:
        checking.compare_pipelined(module.graph, {"steady": steady})
    assert f"{what} changed what 4 steps compute" in str(caught.value)


def test_virtual_steps_keep_the_layout_of_states():
    graph = iteration().graph
    found = run_virtual(graph, 1, steps=3, inputs=lambda step, rank: call())
    expected, x = call()
    for outputs in found.outputs:
        read = expected.as_strided([4], [2]) * x
        expected.sub_(read)
        assert torch.equal(outputs[0][1], read)
    assert found.inputs[0][0].stride() == (8, 2)


def test_inputs_of_virtual_ranks_are_laid_out_as_those_of_the_call():
    graph = iteration().graph
    given = [spread(), torch.arange(8.0)[::2]]
    inputs = Inputs(graph, lay_out(graph, 2), given)
    for rank in range(2):
        found = inputs.at(0, rank)
        assert [each.stride() for each in found] == [(8, 2), (2,)]
        assert torch.equal(found[0], given[0]) and found[0] is not given[0]
    expanded = [spread(), torch.ones(1).expand(4)]
    assert Inputs(graph, lay_out(graph, 1), expanded).at(0, 0)[1].tolist() == [1.0] * 4
