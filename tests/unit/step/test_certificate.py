"""The certificate of a program: its text, its JSON, and what it does not leave out."""

import json

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from torchspmd.step import Outcome, compile, graph_optimization_pass
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


def test_text():
    certificate = Certificate(
        "train_step, program 1",
        (FUSE, IDLE),
        (CHECK,),
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
