"""The verifier on graphs made by hand: planted mistakes, claims, and what is said."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn
from training import train_sum

from torchspmd.errors import PassWarning, UsageError, VerificationError
from torchspmd.step import Outcome, Verification, compile, graph_optimization_pass
from torchspmd.step.graph.reports import GraphSize, PassReport
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.virtual.certificate import Certificate, Check
from torchspmd.step.virtual.compare import digest, find_difference
from torchspmd.step.virtual.verify import Verifier

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
    assert (
        "slice_tensor reads the result of all_reduce_default_2, which was not" in text
    )


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


# ----------------------------------------------------------------------------
# The certificate of a program: its text, its JSON, and what it does not leave out.


FUSE = PassReport(
    "fuse",
    Outcome(4, 4, keeps_bits=("rank",)),
    GraphSize(120, 4, 4096),
    GraphSize(118, 1, 4096),
    "proved equal",
    0.1,
)

IDLE = PassReport(
    "idle", Outcome(0, 0), GraphSize(118, 1, 1), GraphSize(118, 1, 1), "checked", 0.1
)

CHECK = Check(
    "pass fuse", "4 virtual ranks (dp=4)", "rank", 2, 17, "equal bits", ("output 3",)
)

SETTLED = replace(CHECK, vacuous=(), settled=("output 0 (add)", "output 1 (mul)"))


def test_text():
    certificate = Certificate(
        "train_step, program 1",
        (FUSE, IDLE),
        (CHECK, SETTLED),
        ("the captured graph was not compared with the eager step",),
    )
    assert_expected_inline(
        str(certificate),
        """\
Certificate of train_step, program 1
  passes:
    fuse: changed 4 of 4, 120 -> 118 nodes, 4 -> 1 collectives, proved equal
      claims to keep bits under rank; not under ring, tree
    idle: changed 0 of 0, 118 -> 118 nodes, 1 -> 1 collectives, checked
      makes no claim about bits
  verified on virtual ranks:
    pass fuse: equal bits, 17 outputs, rank order, 2 steps, 4 virtual ranks
      (dp=4)
      shows nothing (all zero or NaN): output 3
    pass fuse: equal bits, 17 outputs, rank order, 2 steps, 4 virtual ranks
      (dp=4)
      not proved, compared here: output 0 (add), output 1 (mul)
  not checked:
    * the captured graph was not compared with the eager step""",
    )
    assert certificate.is_verified
    assert certificate.summary() == (
        "certificate: fuse, idle (changed nothing), equal bits on 4 virtual ranks (dp=4), "
        "orders rank"
    )


def test_json():
    certificate = Certificate("train_step, program 1", (FUSE,), (CHECK,), ("eager",))
    data = json.loads(certificate.to_json())
    assert data["passes"][0]["outcome"]["keeps_bits"] == ["rank"]
    assert data["passes"][0]["proof"] == "proved equal"
    assert data["checks"][0]["vacuous"] == ["output 3"]
    assert data["not_checked"] == ["eager"]
    assert data == json.loads(json.dumps(certificate.as_dict()))


@graph_optimization_pass(prerequisites=[], apply_after=[])
def renumber(gm):
    """Adds a node that changes nothing."""
    output = gm.graph.output_node()
    (values,) = output.args
    with gm.graph.inserting_before(output):
        first = gm.graph.call_function(torch.ops.aten.clone.default, (values[0],))
    first.meta = dict(values[0].meta)
    output.args = ([first, *values[1:]],)
    return Outcome(1, 1, keeps_bits=("rank", "ring", "tree"))


def transformed(gm):
    renumber(gm)
    return gm


def train(transformation, **options):
    step = compile(train_sum, gm_transformation=transformation, **options)
    model = nn.Linear(4, 4)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4))
    return step


def double_signs(gm):
    """``-(-x)`` for each output, which is ``x``, but nothing proves it."""
    output = gm.graph.output_node()
    (values,) = output.args
    new = []
    with gm.graph.inserting_before(output):
        for value in values:
            once = gm.graph.call_function(torch.ops.aten.neg.default, (value,))
            twice = gm.graph.call_function(torch.ops.aten.neg.default, (once,))
            once.meta, twice.meta = dict(value.meta), dict(value.meta)
            new.append(twice)
    output.args = (new,)
    return Outcome(len(new), len(new), keeps_bits=("rank",))


doubled = graph_optimization_pass(prerequisites=[], apply_after=[])(double_signs)


def with_doubled_signs(gm):
    doubled(gm)
    return gm


def outputs(batch, **options):
    """A step without a model, two outputs; what was warned of, and its certificate."""

    @compile(gm_transformation=with_doubled_signs, **options)
    def step(batch):
        return batch.exp(), batch.sinh()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PassWarning)
        step(batch)
    texts = [str(each.message) for each in caught if each.category is PassWarning]
    return texts, step.programs[0].certificate


def test_outputs_that_are_not_proved_but_compared_are_no_warning():
    batch = torch.ones(3)
    texts, certificate = outputs(batch)
    assert len(texts) == 1 and "2 of 2 outputs could not be proved" in texts[0]
    texts, certificate = outputs(batch, verify=True)
    assert texts == []
    assert certificate.passes[0].unproved == 2
    (names,) = {check.settled for check in certificate.checks if check.settled}
    assert names == certificate.passes[0].unproved_names
    assert f"not proved, compared here: {names[0]}" in " ".join(
        str(certificate).split()
    )


def test_an_output_that_shows_nothing_is_still_a_warning():
    (text,), certificate = outputs(torch.zeros(3), verify=True)
    assert "1 of 2 outputs could not be proved equal to those before: output 1" in text
    assert text.endswith("all others without a proof were run and compared.")
    (settled,) = certificate.checks[0].settled
    assert settled == certificate.passes[0].unproved_names[0]


def test_graphs_that_are_too_large_to_be_compared_are_still_a_warning():
    small = Verification(limit_bytes=1)
    texts, certificate = outputs(torch.ones(3), verify=small)
    assert "graphs are not compared" in texts[0]
    assert "2 of 2 outputs could not be proved" in texts[1] and len(texts) == 2
    assert not certificate.is_verified


def test_without_verification_there_is_one_too():
    step = train(transformed)
    certificate = step.programs[0].certificate
    assert [report.name for report in certificate.passes] == ["renumber"]
    assert not certificate.is_verified
    assert "not verified on virtual ranks" in str(certificate)
    assert "    certificate: renumber, not verified on virtual ranks" in step.explain()


def test_with_verification():
    step = train(transformed, verify=True)
    certificate = step.programs[0].certificate
    assert [check.what for check in certificate.checks] == [
        "pass renumber",
        "the form that writes in place",
    ]
    assert "it was run on one virtual rank" in str(certificate)
    assert (
        "certificate: renumber, equal bits on 1 virtual ranks without" in step.explain()
    )
    assert max(len(line) for line in str(certificate).splitlines()) <= 80


def test_a_callable_cannot_be_checked():
    step = train(lambda gm: gm.forward, verify=True)
    certificate = step.programs[0].certificate
    assert certificate.checks == ()
    text = " ".join(str(certificate).split())
    assert "a callable that is not a graph: what it computes cannot be checked" in text
