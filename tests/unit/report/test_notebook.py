"""What notebooks show: small tables in which every name is escaped."""

from plan_models import MLP
from prediction_documents import HOSTILE, prediction

from torchspmd.comm import CommEvent, Group, Kind, Ledger
from torchspmd.comm.notebook import html_table
from torchspmd.parallel import ColwiseParallel, Plan, RowwiseParallel
from torchspmd.report import Summary
from torchspmd.step.virtual.certificate import Certificate, Check


def assert_escaped(text):
    assert HOSTILE not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_a_ledger():
    ledger = Ledger()
    group = Group("0", (0, 1), HOSTILE)
    ledger.append(CommEvent(Kind.ALL_REDUCE, "x", "float32", (8,), 2048, 1024, group))
    ledger.note(HOSTILE)
    text = ledger._repr_html_()
    assert_escaped(text)
    for word in ("all_reduce", "2.00 KiB", "1.00 KiB", "Ledger: 1 communications"):
        assert word in text


def test_a_plan():
    plan = Plan({"up": ColwiseParallel(), "down": RowwiseParallel()})
    text = plan.preview(MLP(), {"tp": 4})._repr_html_()
    for word in ("MLP on tp=4", "up.weight", "Shard(0)", "Replicated:"):
        assert word in text


def test_a_certificate():
    check = Check(HOSTILE, "2 ranks", "ring", 2, 7, "equal bits")
    text = Certificate("train", (), (check,), ("dropout",))._repr_html_()
    assert_escaped(text)
    for word in ("Certificate of train", "equal bits", "not checked: dropout"):
        assert word in text


def test_a_prediction():
    document = prediction(layers=1, hostile=True)
    summary = Summary(document)
    text = summary._repr_html_()
    assert_escaped(text)
    assert f"{document['step_seconds'] * 1e3:.4g} ms" in text
    assert repr(summary).startswith("Fits: ")


def test_long_tables_say_what_they_leave_out():
    text = html_table("many", ["number"], [[str(n)] for n in range(50)])
    assert text.count("<tr>") == 41
    assert "and 10 more rows" in text
