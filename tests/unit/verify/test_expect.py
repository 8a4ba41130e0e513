"""Contracts: what they accept, and the text of what they refuse."""

import pytest
import torch

from torchspmd import CommEvent, Kind, Ledger, Phase
from torchspmd.comm import Group
from torchspmd.errors import ContractError, UsageError
from torchspmd.trace.tables import ON_REPLAY
from torchspmd.verify import at_least, at_most, expect

TP = Group("1", (0, 1, 2, 3), axis="tp")
DP = Group("2", (0, 4), axis="dp")


def event(kind=Kind.ALL_REDUCE, module="GPT.head", size=1024, group=TP, **more):
    return CommEvent(
        kind, f"c10d.{kind}", "float32", (size // 4,), size, size, group, module=module
    )._replace(**more)


def block(layer):
    """One reduction each way in both halves of a layer, as tensor parallelism does."""
    for part in ("attention.o_proj", "mlp.down"):
        name = f"GPT.layers.{layer}.{part}"
        yield event(module=name, source=f"gpt.py:{40 + len(part)} forward")
        yield event(module=name, phase=Phase.BACKWARD, source="gpt.py:90 main")


@pytest.fixture
def ledger():
    ledger = Ledger()
    for layer in range(4):
        for each in block(layer):
            ledger.append(each)
    ledger.append(
        event(
            Kind.ALL_GATHER, size=4096, cause="Shard(2) -> Replicate", source="a.py:7 f"
        )
    )
    ledger.append(event(group=DP, phase=Phase.BACKWARD, module="GPT", size=9999))
    return ledger


def text_of(call):
    with pytest.raises(ContractError) as caught:
        call()
    assert isinstance(caught.value, AssertionError)
    return str(caught.value)


def test_counts_by_kind_axis_phase_and_module(ledger):
    num_layers = 4
    expect(ledger).count(all_reduce=2 * num_layers, axis="tp", phase="forward")
    expect(ledger).count(all_reduce=1, all_gather=0, axis="dp")
    expect(ledger).count(18).count(9, phase="backward")
    expect(ledger).count(17, axis=("tp", "cp")).count(18, phase=("forward", "backward"))
    expect(ledger).count(1, module="GPT.head").count(1, module="head")
    expect(ledger).count(all_reduce=8, module="layers.*.mlp")
    expect(ledger).count(0, module="layers.*.mlp", within=False)
    expect(ledger).count(2, module="layers.1.mlp.down", within=False)
    expect(ledger).count(0, phase="optimizer").count(0, dtype="bfloat16")


def test_bytes(ledger):
    expect(ledger).payload_bytes(all_gather=4096, axis="tp")
    expect(ledger).payload_bytes(at_most(1e4), axis="dp")
    expect(ledger).wire_bytes(8 * 1024, phase="forward", module="layers")


def test_bounds(ledger):
    expect(ledger).count(at_least(18)).count(at_most(18)).count(all_gather=at_least(1))
    text = text_of(lambda: expect(ledger).count(all_reduce=at_most(3), axis="tp"))
    assert (
        "count of all_reduce over tp: expected at most 3, got 16 (13 too many)" in text
    )
    text = text_of(lambda: expect(ledger).count(all_gather=at_least(3)))
    assert "expected at least 3, got 1 (2 too few)" in text


def test_functions_of_the_model(ledger):
    class Model:
        layers = range(4)

        def named_modules(self):
            return [("layers", None), ("layers.0", None)]

    by_layer = {"all_reduce": lambda model: 2 * len(model.layers)}
    where = {"axis": "tp", "phase": "forward"}
    expect(ledger, model=Model()).count(**by_layer, **where)
    with pytest.raises(UsageError, match="is a function of the model: give the model"):
        expect(ledger).count(**by_layer)


def test_too_many_names_modules_and_lines_single_ones_first(ledger):
    ledger.append(event(module="GPT.norm", source="gpt.py:77 forward"))
    text = text_of(
        lambda: expect(ledger).count(all_reduce=8, axis="tp", phase="forward")
    )
    assert text == (
        "expect: the ledger differs from what was expected.\n\n"
        "count of all_reduce over tp in forward: expected 8, got 9 (1 too many)\n"
        "    1 all_reduce over tp, 1.00 KiB, forward of GPT.norm: at gpt.py:77 in forward\n"
        "    1 all_reduce over tp, 1.00 KiB, forward of GPT.layers.[0-3].attention.o_proj "
        "(each of 4): at gpt.py:56 in forward\n"
        "    1 all_reduce over tp, 1.00 KiB, forward of GPT.layers.[0-3].mlp.down "
        "(each of 4): at gpt.py:48 in forward"
    )


def test_too_few_says_where_they_are_instead(ledger):
    text = text_of(
        lambda: expect(ledger).count(all_reduce=3, axis="dp", phase="forward")
    )
    assert "expected 3, got 0 (3 too few)" in text
    assert (
        "not counted, since they lie elsewhere: 8 all_reduce over tp in forward, "
        "8 all_reduce over tp in backward, 1 all_reduce over dp in backward" in text
    )


def test_every_kind_of_one_call_at_once(ledger):
    text = text_of(lambda: expect(ledger).count(all_reduce=1, all_gather=2, axis="tp"))
    assert text.startswith("expect: the ledger differs from 2 expectations.")
    assert "of all_reduce over tp" in text and "of all_gather over tp" in text


def test_nothing_else(ledger):
    claims = expect(ledger).count(all_reduce=at_most(99), axis="tp")
    text = text_of(claims.nothing_else)
    assert "nothing else was expected, got 2 more that no claim speaks of" in text
    assert (
        "1 all_gather over tp, 4.00 KiB, forward of GPT.head: redistribution from "
        in (text)
    )
    assert "1 all_reduce over dp" in text and "mlp" not in text
    claims.payload_bytes(9999, axis="dp").count(all_gather=1).nothing_else()
    expect(Ledger()).nothing_else()


def test_forbid_implicit(ledger):
    expect(ledger).forbid_implicit()
    ledger.append(
        event(
            module="GPT.loss",
            implicit=True,
            cause="aten.nll_loss.default: Shard(0) -> Replicate",
            source="train.py:12 step",
        )
    )
    expect(ledger).forbid_implicit(phase="backward").forbid_implicit(module="layers")
    text = text_of(lambda: expect(ledger).forbid_implicit())
    assert "count of implicit communication: expected 0, got 1" in text
    assert (
        "forward of GPT.loss: DTensor redistributed an operand of aten.nll_loss.default "
        "from Shard(0) to Replicate at train.py:12 in step" in text
    )


def test_a_with_block_tells_everything_at_once(ledger):
    def contract():
        with expect(ledger) as claims:
            claims.count(all_reduce=1)
            claims.payload_bytes(all_gather=1)
            claims.nothing_else()

    text = text_of(contract)
    assert text.startswith("expect: the ledger differs from 2 expectations.")
    assert "payload bytes of all_gather: expected 1, got 4096 (4.00 KiB)" in text


def test_an_error_inside_a_with_block_is_the_one_that_is_told(ledger):
    with pytest.raises(KeyError), expect(ledger) as claims:
        claims.count(all_reduce=1)
        raise KeyError


def test_checks_count_only_when_asked_for(ledger):
    ledger.append(event(Kind.BROADCAST, check=True))
    expect(ledger).count(broadcast=0).count(18)
    expect(ledger, checks=True).count(broadcast=1)


def test_what_a_reader_must_know_is_told(ledger):
    small = Ledger(max_events=1)
    for each in ledger.events:
        small.append(each._replace(source=None))
    small.note("something happened")
    text = text_of(lambda: expect(small).count(0))
    assert "Note: something happened." in text
    assert "17 single events were dropped (the limit is 1), with their causes" in text
    assert text.endswith("For the lines of the program, record with sources=True.")


def test_many_rows_are_cut_and_counted():
    ledger = Ledger()
    for name in "abcdefghijklmnop":
        ledger.append(event(module=f"GPT.{name}"))
    assert "\n    and 4 rows more" in text_of(lambda: expect(ledger).count(0))


def test_a_ledger_that_missed_something_holds_no_contract(ledger):
    ledger.note(ON_REPLAY)
    text = text_of(lambda: expect(ledger))
    assert text.startswith(
        "expect: the ledger is not complete: a CUDA graph was replayed"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({}, r"count\(\) says no number"),
        (
            {"all_reduced": 3},
            r"all_reduced is neither a kind \(all_reduce, .*nor one of",
        ),
        ({"all_reduce": 3, "axes": "tp"}, "axes is neither a kind"),
        (
            {"all_reduce": 3, "phase": "forwards"},
            "'forwards' is no phase; choose among",
        ),
        ({"all_reduce": "3"}, "count of all_reduce: '3' is not a number"),
        ({"all_reduce": True}, "True is not a number"),
        ({"all_reduce": 2.5}, "2.5 is not a whole number from 0 on"),
        ({"all_reduce": -1}, "-1 is not a whole number"),
    ],
)
def test_words_without_meaning(ledger, words, sentence):
    with pytest.raises(UsageError, match=sentence):
        expect(ledger).count(**words)


def test_not_a_ledger(ledger):
    with pytest.raises(UsageError, match="takes a Ledger; it was given a dict"):
        expect({})
    mode = type("Mode", (), {"ledger": ledger})()
    with pytest.raises(
        UsageError, match=r"a Ledger, such as comm_mode\.ledger; it was"
    ):
        expect(mode)


# Claims that would hold whatever the program does.


@pytest.mark.parametrize("dtype", ["fp32", "float33", ("float32", "half32"), "nn"])
def test_a_dtype_that_torch_does_not_have_is_refused(ledger, dtype):
    with pytest.raises(UsageError, match=r"is no dtype of torch; give one such as"):
        expect(ledger).count(0, dtype=dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, "float32", "torch.float32", (torch.float32, "bfloat16")]
)
def test_a_dtype_may_stand_for_its_name(ledger, dtype):
    expect(ledger).count(18, dtype=dtype)
    assert "expected 0, got 18" in text_of(lambda: expect(ledger).count(0, dtype=dtype))


def test_an_empty_ledger_keeps_no_contract():
    for claim in (
        lambda claims: claims.count(all_reduce=0),
        lambda claims: claims.count(at_most(8)),
        lambda claims: claims.count(0, phase="optimizer"),
        lambda claims: claims.payload_bytes(all_gather=at_most(1e6)),
        lambda claims: claims.forbid_implicit(),
    ):
        text = text_of(lambda claim=claim: claim(expect(Ledger())))
        assert "the ledger is empty: no communication was recorded" in text
    assert "expected 4, got 0" in text_of(lambda: expect(Ledger()).count(all_reduce=4))


def test_nothing_at_all_is_a_claim_of_its_own():
    expect(Ledger()).count(0).forbid_implicit().count(all_reduce=at_most(1))
    expect(Ledger()).payload_bytes(0).nothing_else()
    expect(Ledger()).nothing_else()


def test_an_empty_ledger_is_said_once_in_a_block():
    with pytest.raises(ContractError) as caught, expect(Ledger()) as claims:
        claims.count(all_reduce=0).forbid_implicit().nothing_else()
    assert str(caught.value).count("the ledger is empty") == 1
