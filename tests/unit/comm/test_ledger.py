"""Totals are exact, events are bounded, queries say what they do not know."""

import gc
import tracemalloc
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_strategies import events, ledgers, make_event, make_ledger

from torchspmd.comm import Group, Kind, Ledger, Phase, Total, is_within
from torchspmd.comm.ledger import DEFAULT_MAX_EVENTS, FIELDS, Key
from torchspmd.errors import UsageError

_FIELD_LIST = "kind, op, axis, dtype, phase, module, implicit, compiled, check"


def _sum(recorded):
    return Total(
        len(recorded),
        sum(event.payload_bytes for event in recorded),
        sum(event.wire_bytes for event in recorded),
    )


@given(st.lists(events, max_size=30), st.integers(0, 10))
def test_totals_equal_the_brute_force_sum(recorded, limit):
    ledger = make_ledger(*recorded, max_events=limit)
    rows = defaultdict(list)
    for event in recorded:
        rows[tuple(getattr(event, field) for field in FIELDS)].append(event)
    assert ledger.rows == {Key(*key): _sum(found) for key, found in rows.items()}
    assert ledger.total() == _sum(recorded)
    assert len(ledger) == len(recorded)
    assert ledger.events == tuple(recorded[:limit])
    assert ledger.dropped == max(0, len(recorded) - limit)


@given(st.lists(events, max_size=20), st.sampled_from(FIELDS), st.sampled_from(FIELDS))
def test_total_by_equals_the_brute_force_sum(recorded, first, second):
    sums = defaultdict(list)
    for event in recorded:
        sums[getattr(event, first), getattr(event, second)].append(event)
    found = make_ledger(*recorded).total_by(first, second)
    assert found == {key: _sum(group) for key, group in sums.items()}


@given(st.lists(events, max_size=20), events, st.sampled_from(FIELDS), st.booleans())
def test_total_equals_the_brute_force_filter(recorded, wanted, field, within):
    value = getattr(wanted, field)

    def matches(event):
        found = getattr(event, field)
        if field == "module" and within:
            return found == value or found.startswith(value + ".")
        return found == value

    found = make_ledger(*recorded).total(**{field: value, "within": within})
    assert found == _sum([event for event in recorded if matches(event)])


def test_total_by_nothing_is_one_sum_and_by_field_is_plain_text():
    ledger = make_ledger(make_event(), make_event(Kind.ALL_GATHER, 1, 1))
    assert ledger.total_by() == {(): Total(2, 129, 193)}
    keys = list(ledger.total_by("kind", "phase"))
    assert keys == [("all_reduce", "forward"), ("all_gather", "forward")]
    assert {type(part) for key in keys for part in key} == {str}


def test_filters_are_combined():
    ledger = make_ledger(
        make_event(module="GPT.h.0"),
        make_event(module="GPT.h.0", phase=Phase.BACKWARD),
        make_event(module="GPT.h2"),
        make_event(module="GPT.h", axis="dp", implicit=True),
    )
    assert ledger.total(module="GPT.h").count == 3
    assert ledger.total(module="GPT.h", within=False).count == 1
    assert ledger.total(module="GPT.h", phase="forward", axis="tp").count == 1
    assert ledger.total(implicit=True) == Total(1, 128, 192)
    assert ledger.total_by("axis", module="GPT.h", within=False) == {
        ("dp",): Total(1, 128, 192)
    }
    assert list(ledger.select(phase=Phase.BACKWARD)) == [
        Key(
            Kind.ALL_REDUCE,
            "c10d_functional.all_reduce",
            "tp",
            "float32",
            Phase.BACKWARD,
            "GPT.h.0",
        )
    ]


@pytest.mark.parametrize("query", [Ledger.select, Ledger.total, Ledger.total_by])
def test_unknown_filter_is_an_error(query):
    with pytest.raises(UsageError) as caught:
        query(Ledger(), rank=3, axes="tp")
    assert str(caught.value) == (
        "Ledger.select: unknown field 'axes', 'rank'. "
        f"Choose among: {_FIELD_LIST}, within."
    )


def test_unknown_group_field_is_an_error():
    with pytest.raises(UsageError) as caught:
        Ledger().total_by("kind", "layer")
    assert str(caught.value) == (
        f"Ledger.total_by: unknown field 'layer'. Choose among: {_FIELD_LIST}."
    )


def test_negative_limit_is_an_error():
    with pytest.raises(UsageError) as caught:
        Ledger(max_events=-1)
    assert str(caught.value) == (
        "Ledger(max_events=-1): the number of events to keep cannot be negative. "
        "Pass 0 to keep totals only."
    )


@pytest.mark.parametrize(
    ("limit", "kept", "dropped"), [(0, 0, 5), (3, 3, 2), (5, 5, 0), (9, 5, 0)]
)
def test_events_beyond_the_limit_are_counted_as_dropped(limit, kept, dropped):
    ledger = make_ledger(*[make_event(payload=n) for n in range(5)], max_events=limit)
    assert [event.payload_bytes for event in ledger.events] == list(range(kept))
    assert ledger.dropped == dropped
    assert ledger.total().payload_bytes == 10
    assert repr(ledger) == (
        f"Ledger(5 communications, 10 payload bytes, {dropped} events dropped)"
    )


def test_add_total_counts_without_an_event():
    ledger = make_ledger(make_event())
    (key,) = ledger.rows
    ledger.add_total(key, Total(2, 3, 4))
    assert ledger.rows == {key: Total(3, 131, 196)}
    assert len(ledger.events) == 1
    assert ledger.dropped == 0


def test_notes_are_counted():
    ledger = Ledger()
    ledger.note("a region was not seen")
    ledger.note("a region was not seen", 2)
    ledger.note("other")
    assert ledger.notes == {"a region was not seen": 3, "other": 1}


def test_what_is_returned_is_a_copy():
    ledger = make_ledger(make_event())
    ledger.note("text")
    before = make_ledger(make_event())
    before.note("text")
    ledger.notes.clear()
    ledger.rows.clear()
    ledger.select().clear()
    assert isinstance(ledger.events, tuple)
    assert ledger == before
    with pytest.raises(AttributeError):
        ledger.events = ()


@given(ledgers())
def test_equal_to_a_replay_of_itself(ledger):
    replay = Ledger(max_events=ledger.max_events)
    for key, total in ledger.rows.items():
        replay.add_total(key, total)
    replay.restore_events(ledger.events, ledger.dropped)
    for text, times in ledger.notes.items():
        replay.note(text, times)
    assert replay == ledger


@pytest.mark.parametrize(
    "other",
    [
        make_ledger(),
        make_ledger(make_event(), make_event()),
        make_ledger(make_event(), max_events=0),
        make_ledger(make_event(payload=1)),
        make_ledger(make_event(source="a.py:1 f")),
    ],
)
def test_ledgers_differ(other):
    assert make_ledger(make_event()) != other


def test_notes_make_a_difference_and_other_types_are_never_equal():
    noted = make_ledger(make_event())
    noted.note("text")
    assert noted != make_ledger(make_event())
    assert noted != "a ledger"


def test_a_ledger_has_no_hash():
    with pytest.raises(TypeError, match="unhashable"):
        hash(Ledger())


@pytest.mark.parametrize(
    ("module", "parent", "expected"),
    [
        ("GPT", "GPT", True),
        ("GPT.h.1", "GPT.h", True),
        ("GPT.h2", "GPT.h", False),
        ("GPT", "GPT.h", False),
        ("", "GPT", False),
    ],
)
def test_is_within(module, parent, expected):
    assert is_within(module, parent) is expected


def _step():
    # New objects each time, as a running program makes them.
    group = Group("0", tuple(range(8)), None)
    return [
        make_event(payload=n, module=f"GPT.h.{n}")._replace(
            group=group, shape=(1000 + n, 1000), source=f"train.py:{n} step"
        )
        for n in range(50)
    ]


def test_steps_that_repeat_do_not_grow_memory():
    ledger = Ledger()
    for event in _step():
        ledger.append(event)
    tracemalloc.start()
    try:
        for _ in range(200):
            for event in _step():
                ledger.append(event)
        gc.collect()  # Python keeps up to 2,000 dead tuples of each size for reuse
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 200_000
    assert len(ledger) == 10_050
    assert len(ledger.events) == DEFAULT_MAX_EVENTS
    assert ledger.dropped == 50


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (
            {"kind": "allreduce"},
            "kind='allreduce' is no kind. Choose among: all_reduce, ",
        ),
        (
            {"phase": "sideways"},
            "phase='sideways' is no phase. Choose among: forward, ",
        ),
    ],
)
def test_a_misspelt_value_does_not_read_as_zero(where, text):
    with pytest.raises(UsageError, match=text):
        Ledger().total(**where)
