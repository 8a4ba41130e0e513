"""The certificate of a program: its text, its JSON, and what it does not leave out."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from torchspmd.errors import PassWarning
from torchspmd.step import Outcome, Verification, compile, graph_optimization_pass
from torchspmd.step.graph.reports import GraphSize, PassReport
from torchspmd.step.virtual.certificate import Certificate, Check

pytestmark = pytest.mark.unit

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
    @compile(gm_transformation=transformation, **options)
    def step(model, optim, batch):
        model(batch).sum().backward()
        optim.step()
        optim.zero_grad()

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
