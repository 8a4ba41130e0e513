"""The verifier on graphs made by hand: planted mistakes, claims, and what is said."""

import pytest
import torch
from torch import fx, nn

from torchspmd.errors import PassWarning, UsageError, VerificationError
from torchspmd.step.graph.reports import GraphSize, Outcome, PassReport
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.virtual.compare import digest, find_difference
from torchspmd.step.virtual.verify import Verification, Verifier

pytestmark = pytest.mark.unit

c10d = torch.ops._c10d_functional
aten = torch.ops.aten
SIZES = (48, 80)


def gradients():
    """Two gradients, each summed over ranks and then used."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"gradient{n}") for n in range(2)]
    starts = [
        graph.call_function(c10d.all_reduce.default, (x, "sum", "0")) for x in inputs
    ]
    waits = [graph.call_function(c10d.wait_tensor.default, (s,)) for s in starts]
    used = [graph.call_function(aten.mul.Tensor, (wait, 2.0)) for wait in waits]
    graph.output(used)
    return fx.GraphModule(nn.Module(), graph)


def fuse(graph, *, order=(0, 1), offsets=(0, SIZES[0]), waits=True):
    """The same with one bucket; the options plant mistakes."""
    edited, _ = copy_graph(graph)
    inputs = edited.find_nodes(op="placeholder")
    old = edited.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    with edited.inserting_before(old[0]):
        joined = edited.call_function(aten.cat.default, ([inputs[n] for n in order],))
        bucket = edited.call_function(c10d.all_reduce.default, (joined, "sum", "0"))
        if waits:
            bucket = edited.call_function(c10d.wait_tensor.default, (bucket,))
        for wait, start, size in zip(old, offsets, SIZES, strict=True):
            piece = edited.call_function(
                aten.slice.Tensor, (bucket, 0, start, start + size)
            )
            wait.replace_all_uses_with(piece)
    edited.eliminate_dead_code()
    edited.lint()
    return edited


def said(keeps_bits, name="fuse"):
    size = GraphSize(1, 1, 1)
    return PassReport(
        name, Outcome(2, 2, keeps_bits=keeps_bits), size, size, "checked", 0
    )


def verifier(gm, **options):
    torch.manual_seed(0)
    call = [torch.randn(size) for size in SIZES]
    return Verifier("train_step, program 0", gm, call, Verification(**options))


def observe(edit, keeps_bits=("rank",), **options):
    gm = gradients()
    checking = verifier(gm, **options)
    checking.observe(said(keeps_bits), gm.graph, edit)
    return checking


def test_a_plain_bucket_keeps_bits_rank_by_rank():
    checking = observe(fuse(gradients().graph), ("rank", "tree"))
    assert [(c.what, c.order, c.result) for c in checking.checks] == [
        ("pass fuse", "rank", "equal bits"),
        ("pass fuse", "tree", "equal bits"),
    ]
    assert checking.checks[0].ranks == "4 virtual ranks (group 0=4)"
    assert (checking.checks[0].outputs, checking.checks[0].steps) == (2, 2)


def test_a_plain_bucket_does_not_keep_bits_in_a_ring():
    with pytest.raises(VerificationError) as caught:
        observe(fuse(gradients().graph), ("rank", "ring"))
    text = str(caught.value)
    assert "train_step, program 0: pass fuse changed what the step computes" in text
    assert "4 virtual ranks (group 0=4), reduction order ring" in text
    assert (
        "first node that differs: mul_tensor (Global, forward), step 0, rank 0" in text
    )
    assert "from nodes that were added: slice_tensor, " in text
    assert "cat_default" in text
    assert "before: float32[48], min " in text and "after:  float32[48], min " in text
    assert "ulp apart" in text
    assert "2 of 2 outputs differ" in text
    assert "fuse claims to keep bits under rank, ring; not under tree." in text


@pytest.mark.parametrize(
    ("mistake", "node"),
    [
        ({"order": (1, 0)}, "mul_tensor"),
        ({"offsets": (0, SIZES[0] - 1)}, "mul_tensor_1"),
        ({"offsets": (1, SIZES[0])}, "mul_tensor"),
    ],
    ids=["a cat in another order", "a slice too early", "a slice too late"],
)
def test_planted_mistakes(mistake, node):
    with pytest.raises(VerificationError) as caught:
        observe(fuse(gradients().graph, **mistake))
    assert "pass fuse changed" in str(caught.value)
    assert f"first node that differs: {node} (" in str(caught.value)


def test_a_lost_wait():
    with pytest.raises(VerificationError) as caught:
        observe(fuse(gradients().graph, waits=False))
    text = str(caught.value)
    assert "after pass fuse the graph cannot be run, before it could" in text
    assert "slice_tensor reads the result of all_reduce_default_2, which nobody" in text


def test_a_slice_of_another_size():
    edit = fuse(gradients().graph, offsets=(0, SIZES[0] + 1))
    with pytest.raises(VerificationError, match=r"float32\[79\]"):
        observe(edit)


def test_other_strides_in_front_of_the_difference_are_told():
    graph = fx.Graph()
    table = graph.call_function(aten.view.default, (graph.placeholder("x"), [6, 8]))
    minus = graph.call_function(aten.neg.default, (table,))
    graph.output([graph.call_function(aten.as_strided.default, (minus, [48], [1]))])
    gm = fx.GraphModule(nn.Module(), graph)
    edit, _ = copy_graph(graph)
    (minus,) = edit.find_nodes(op="call_function", target=aten.neg.default)
    with edit.inserting_before(minus):  # the same table, column after column
        columns = edit.call_function(aten.t.default, (minus.args[0],))
        options = {"memory_format": torch.contiguous_format}
        copied = edit.call_function(aten.clone.default, (columns,), options)
        minus.update_arg(0, edit.call_function(aten.t.default, (copied,)))
    checking = Verifier("step", gm, [torch.randn(48)], Verification())
    with pytest.raises(VerificationError) as caught:
        checking.observe(said(("rank",)), graph, edit)
    assert "first node that differs: as_strided_default (" in str(caught.value)
    assert "other strides: neg_default, (8, 1) -> (1, 6)" in str(caught.value)


def test_exchanged_outputs():
    gm = gradients()
    edit, _ = copy_graph(gm.graph)
    edit.output_node().args = (list(reversed(edit.output_node().args[0])),)
    with pytest.raises(VerificationError, match="outputs were exchanged"):
        observe(edit)


def test_a_lost_output():
    edit, _ = copy_graph(gradients().graph)
    edit.output_node().args = (edit.output_node().args[0][:1],)
    with pytest.raises(VerificationError, match="1 of 1 outputs differ"):
        observe(edit)


def test_the_right_pass_of_several():
    gm = gradients()
    checking = verifier(gm)
    good = fuse(gm.graph)
    checking.observe(said(("rank",), "good"), gm.graph, good)
    bad, _ = copy_graph(good)
    (joined,) = bad.find_nodes(op="call_function", target=aten.cat.default)
    joined.args = (list(reversed(joined.args[0])),)
    with pytest.raises(VerificationError, match="pass bad changed") as caught:
        checking.observe(said(("rank",), "bad"), good, bad)
    assert "first node that differs: cat_default (" in str(caught.value)


def test_an_edit_between_two_passes():
    gm = gradients()
    checking = verifier(gm)
    edited, _ = copy_graph(gm.graph)
    edited.find_nodes(op="call_function", target=aten.mul.Tensor)[1].update_arg(1, 3.0)
    with pytest.raises(
        VerificationError, match="an edit outside of the passes changed"
    ):
        checking.observe(said(None), edited, fuse(edited))


def test_bits_that_may_change_are_a_line():
    edit = fuse(gradients().graph, order=(1, 0))
    checking = observe(edit, ())
    (check,) = checking.checks
    assert check.result.startswith("other bits in 2 outputs (output 0 (mul_tensor)")
    assert check.result.endswith(" of the largest entry apart")
    gap = float(check.result.split("at most ")[1].split()[0])
    assert 0.01 < gap < 10  # two gradients were exchanged: that is no rounding


def test_a_pass_without_a_claim_is_held_to_the_order_of_ranks():
    assert [c.order for c in observe(fuse(gradients().graph), None).checks] == ["rank"]
    with pytest.raises(VerificationError, match="fuse makes no claim about bits"):
        observe(fuse(gradients().graph, order=(1, 0)), None)


def test_what_shows_nothing_is_told():
    gm = gradients()
    for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        node.update_arg(1, 0.0 if node.name == "mul_tensor" else float("nan"))
    checking = verifier(gm)
    checking.observe(said(("rank",)), gm.graph, fuse(gm.graph))
    (check,) = checking.checks
    assert check.vacuous == ("output 0 (mul_tensor)", "output 1 (mul_tensor_1)")


def sized(gm):
    for node, size in zip(gm.graph.find_nodes(op="placeholder"), SIZES, strict=True):
        node.meta["val"] = torch.empty(size)
    return gm


def test_too_much_memory():
    gm = sized(gradients())
    with pytest.warns(
        PassWarning, match=r"not compared. inputs and outputs of 4 virtual"
    ):
        checking = verifier(gm, limit_bytes=1024)
    checking.observe(said(("rank",)), gm.graph, fuse(gm.graph, order=(1, 0)))
    assert checking.checks == []
    assert "take 2.00 KiB, above the limit of 1.00 KiB" in checking.refusal


def test_too_few_ranks():
    with pytest.raises(UsageError, match="take at least 4 ranks"):
        Verification(ranks=2)


def test_distance_in_units_of_the_last_place():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        one = torch.tensor([1.0, -0.0, -1.0], dtype=dtype)
        far = one.clone()
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
        far.view(kind)[0] += 3
        found = find_difference(one, far)
        assert found.ulp == 3 and round(found.share, 3) == 0.333
        crossed = torch.tensor([1.0, 0.0, -1.0], dtype=dtype)
        assert find_difference(one, crossed).ulp == 0  # two zeros, other bits
        assert digest(one) != digest(crossed)
    assert digest(torch.tensor(float("nan"))) == digest(torch.tensor(float("nan")))
    assert digest([torch.ones(1), 2]) != digest([torch.ones(1), 2.0])
    assert find_difference(torch.ones(2), torch.ones(3)).share == 1
