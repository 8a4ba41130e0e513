"""``compile(verify=True)``: the passes of a captured step, run on virtual ranks."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from training import train

from torchspmd.errors import LegalityError, PassWarning, VerificationError
from torchspmd.step import (
    DataParallel,
    GraphModuleTransformation,
    Verification,
    compile,
    graph_optimization_pass,
)
from torchspmd.step.deferral.forms import derive
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.passes import comm_fusion_with_concat
from torchspmd.step.virtual import run as pipelined
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake

c10d = torch.ops._c10d_functional
ADAMW = torch.ops.aten._fused_adamw.tensor_lr


def compiled(transformation=None, *, ranks=4, steps=1, verify=True, mode="replicate"):
    """A step on a mesh of any size, run so often."""
    with fake_mesh(ranks, ("dp",)) as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 17), nn.Tanh(), nn.Linear(17, 3))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        step = compile(
            mesh=mesh,
            parallel_mode=DataParallel(mode),
            gm_transformation=transformation,
            verify=verify,
        )(train)
        for _ in range(steps):
            step(model, optim, torch.randn(4, 5))
        step.flush()
        return step


def fused(layout):
    return functools.partial(comm_fusion_with_concat, bucket_size_mb=1, layout=layout)


def orders(step, what):
    return [c.order for c in step.programs[-1].certificate.checks if c.what == what]


def test_the_default_passes_and_the_next_iteration():
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, overlap_iterations=True
    )
    step = compiled(transformation, steps=2)
    certificate = step.programs[-1].certificate
    names = [report.name for report in certificate.passes]
    assert "comm_fusion_with_concat" in names and "schedule_comm_wait" in names
    assert orders(step, "pass comm_fusion_with_concat") == ["rank"]
    assert orders(step, "pass schedule_comm_wait") == ["rank", "ring", "tree"]
    assert orders(step, "the form that writes in place") == ["rank"]
    moved = "work moved to the next iteration (regions: 1)"
    for what in (moved, f"{moved}, first and steady form in place"):
        assert orders(step, what) == ["rank"]
    assert {check.result for check in certificate.checks} == {"equal bits"}
    text = " ".join(str(certificate).split())
    assert "the captured graph was not compared with the eager step" in text
    assert "every virtual rank ran the graph of this rank" in text
    left = (
        "neither the last form nor the flush of an overlapped step was compared as it"
    )
    assert f"{left} writes in place" in text


def test_an_update_that_is_made_otherwise_a_step_later(monkeypatch):
    def careless(graph, regions):
        forms = derive(graph, regions)
        (optimizer,) = forms.steady.graph.find_nodes(op="call_function", target=ADAMW)
        optimizer.update_kwarg("weight_decay", 0.5)
        return forms

    monkeypatch.setattr(pipelined, "derive", careless)
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, overlap_iterations=True
    )
    with pytest.raises(VerificationError) as caught:
        compiled(transformation, steps=2)
    text = str(caught.value)
    assert (
        "program 1: work moved to the next iteration (regions: 1) changed what 4 "
        in text
    )
    assert "arg0_1 (Sequential.0.weight)" in text


def test_a_rank_major_bucket_keeps_bits_in_a_ring():
    transformation = GraphModuleTransformation(passes=[fused("rank_major")])
    for ranks in (4, 6):
        step = compiled(transformation, ranks=ranks)
        assert orders(step, "pass comm_fusion_with_concat") == ["rank", "ring"]
        (ring,) = [c for c in step.programs[0].certificate.checks if c.order == "ring"]
        assert ring.ranks == f"{ranks} virtual ranks (dp={ranks})"


@graph_optimization_pass(prerequisites=[], apply_after=[])
def overclaiming(gm):
    """A plain bucket that says it keeps bits in a ring."""
    said = comm_fusion_with_concat.__wrapped__(gm, 1, layout="plain")
    return replace(said, keeps_bits=("rank", "ring"))


def test_a_plain_bucket_does_not():
    with pytest.raises(VerificationError) as caught:
        compiled(GraphModuleTransformation(passes=[overclaiming]))
    text = str(caught.value)
    assert "train, program 0: pass overclaiming changed what" in text
    assert "4 virtual ranks (dp=4), reduction order ring" in text
    assert "all_reduce_default" in text
    assert "overclaiming claims to keep bits under rank, ring; not under tree" in text


def test_a_mesh_of_two_cannot_show_a_ring():
    step = compiled(GraphModuleTransformation(passes=[overclaiming]), ranks=2)
    text = " ".join(str(step.programs[0].certificate).split())
    assert "ring order was run on 2 ranks along dp" in text
    assert "do not show every order" in text


def drop_wait(gm):
    """Uses a gradient that may not have arrived."""
    wait = gm.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)[1]
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)
    gm.recompile()
    return gm


def test_a_wait_lost_outside_of_the_passes():
    with pytest.raises(LegalityError) as caught:
        compiled(drop_wait)
    text = str(caught.value)
    assert text.startswith("compile(gm_transformation=drop_wait) would change what the")
    assert "wait: nothing waits for all_reduce_1" in text


def change_decay(gm):
    (optimizer,) = gm.graph.find_nodes(op="call_function", target=ADAMW)
    optimizer.update_kwarg("weight_decay", 0.5)
    gm.recompile()
    return IterGraphModule(gm)


def test_a_number_changed_outside_of_the_passes():
    with pytest.raises(LegalityError) as caught:
        compiled(change_decay)
    text = str(caught.value)
    assert text.startswith("compile(gm_transformation=change_decay) would change what")
    assert "arg0_1 (Sequential.0.weight)): another number or option" in text


def sine(gm):
    """Another function, of which legality cannot tell that it is wrong."""
    for node in gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten.tanh.default
    ):
        node.target = torch.ops.aten.sin.default
    return gm


def test_an_edit_outside_of_the_passes_that_is_not_proved_is_run():
    with pytest.raises(VerificationError) as caught:
        compiled(sine)
    text = str(caught.value)
    assert "pass sine changed what the step computes" in text
    assert "first node that differs: " in text


def test_fully_sharded_parameters():
    step = compiled(mode="fully_shard", steps=2)
    (check,) = step.programs[-1].certificate.checks
    assert check.ranks == "4 virtual ranks (dp=4)"
    assert check.vacuous == ()


def test_large_worlds_are_bounded():
    step = compiled(
        GraphModuleTransformation(passes=[fused("rank_major")]),
        ranks=64,
        verify=Verification(max_ranks=16),
    )
    assert orders(step, "pass comm_fusion_with_concat") == ["rank"]
    text = " ".join(str(step.programs[0].certificate).split())
    assert "ring order: 64 virtual ranks (dp=64) are more than 16" in text


def test_large_models_are_bounded():
    with pytest.warns(PassWarning, match="graphs are not compared"):
        step = compiled(verify=Verification(limit_bytes=1000))
    certificate = step.programs[0].certificate
    assert not certificate.is_verified
    assert certificate.not_checked[0].startswith("graphs were not compared: inputs and")
