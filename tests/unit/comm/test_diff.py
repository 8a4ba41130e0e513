"""What changed between two ledgers."""

import pytest
from hypothesis import given
from ledger_strategies import events, ledgers, make_event, make_ledger

from torchspmd.comm import Change, Kind, Ledger, Phase, Total, diff_ledgers

_ONE = Total(1, 128, 192)


def _change(before, after, **fields):
    defaults = {
        "module": "Global",
        "kind": "all_reduce",
        "axis": "tp",
        "dtype": "float32",
        "phase": "forward",
        "implicit": False,
    }
    return Change(**{**defaults, **fields}, before=before, after=after)


def test_added():
    (change,) = diff_ledgers(Ledger(), make_ledger(make_event(module="GPT")))
    assert change == _change(Total(), _ONE, module="GPT")
    assert (change.added_count, change.added_bytes) == (1, 128)


def test_removed():
    (change,) = diff_ledgers(make_ledger(make_event(implicit=True)), Ledger())
    assert change == _change(_ONE, Total(), implicit=True)
    assert (change.added_count, change.added_bytes) == (-1, -128)


def test_changed():
    before = make_ledger(make_event(), make_event(Kind.BARRIER, 0, 0))
    after = make_ledger(
        make_event(payload=100), make_event(), make_event(Kind.BARRIER, 0, 0)
    )
    assert diff_ledgers(before, after) == (_change(_ONE, Total(2, 228, 384)),)


def test_wire_bytes_alone_make_a_change():
    changes = diff_ledgers(make_ledger(make_event(wire=1)), make_ledger(make_event()))
    assert changes == (_change(Total(1, 128, 1), _ONE),)


@pytest.mark.parametrize(
    "fields",
    [
        {"axis": "dp"},
        {"phase": Phase.BACKWARD},
        {"module": "GPT"},
        {"implicit": True},
        {"kind": Kind.REDUCE},
    ],
)
def test_a_moved_communication_is_one_less_and_one_more(fields):
    changes = diff_ledgers(make_ledger(make_event()), make_ledger(make_event(**fields)))
    assert sorted(change.added_count for change in changes) == [-1, 1]
    assert {type(change.kind) for change in changes} == {str}


def test_spelling_events_and_notes_do_not_count():
    before = make_ledger(make_event(op="c10d_functional.all_reduce"))
    after = make_ledger(
        make_event(op="c10d.allreduce_", compiled=True, source="a.py:1 f"), max_events=0
    )
    after.note("text")
    assert before != after
    assert diff_ledgers(before, after) == ()


def test_order_is_by_module_kind_axis_and_phase():
    recorded = [
        make_event(module="b"),
        make_event(module="a", phase=Phase.FORWARD),
        make_event(module="a", phase=Phase.BACKWARD),
        make_event(Kind.ALL_GATHER, module="a", axis="x"),
        make_event(Kind.ALL_GATHER, module="a", axis="dp"),
    ]
    changes = diff_ledgers(Ledger(), make_ledger(*recorded))
    assert [(c.module, c.kind, c.axis, c.phase) for c in changes] == [
        ("a", "all_gather", "dp", "forward"),
        ("a", "all_gather", "x", "forward"),
        ("a", "all_reduce", "tp", "backward"),
        ("a", "all_reduce", "tp", "forward"),
        ("b", "all_reduce", "tp", "forward"),
    ]


@given(ledgers())
def test_no_change_to_itself(ledger):
    assert diff_ledgers(ledger, ledger) == ()


@given(ledgers(), ledgers())
def test_changes_are_opposite_the_other_way_and_add_up(before, after):
    forth, back = diff_ledgers(before, after), diff_ledgers(after, before)
    assert [(c.before, c.after) for c in forth] == [(c.after, c.before) for c in back]
    assert sum(c.added_count for c in forth) == len(after) - len(before)
    grown = after.total().payload_bytes - before.total().payload_bytes
    assert sum(c.added_bytes for c in forth) == grown


@given(ledgers(), events)
def test_one_more_event_is_one_change(ledger, event):
    more = make_ledger()
    for key, total in ledger.rows.items():
        more.add_total(key, total)
    more.append(event)
    (change,) = diff_ledgers(ledger, more)
    assert change.added_count == 1
    assert (change.module, change.axis) == (event.module, event.axis)
