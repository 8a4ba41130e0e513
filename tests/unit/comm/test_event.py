"""Groups as text, events as values, and the mark of a check."""

import threading

import pytest
from ledger_strategies import make_event

from torchspmd.comm import GLOBAL, CommEvent, Group, Kind, Phase
from torchspmd.comm.event import is_check, marked_as_check


@pytest.mark.parametrize(
    ("ranks", "axis", "label"),
    [
        ((0, 1, 2, 3), "tp", "tp"),
        ((), "tp", "tp"),
        ((3,), None, "ranks 3"),
        ((0, 1), None, "ranks 0,1"),
        ((0, 4), None, "ranks 0,4"),
        ((0, 1, 2), None, "ranks 0-2"),
        (tuple(range(8, 1024)), None, "ranks 8-1023"),
        ((0, 2, 4, 6), None, "ranks 0-6 step 2"),
        ((1, 9, 17), None, "ranks 1-17 step 8"),
        ((0, 1, 3), None, "ranks 0,1,3"),
        ((0, 2, 3), None, "ranks 0,2,3"),
        ((2, 1, 0), None, "ranks 2,1,0"),
        ((0, 2, 4, 5), None, "ranks 0,2,4,5"),
        ((), None, "group 7"),
    ],
)
def test_label(ranks, axis, label):
    group = Group(name="7", ranks=ranks, axis=axis)
    assert group.label == label
    assert make_event()._replace(group=group).axis == label
    assert group.size == len(ranks)


def test_groups_are_values():
    group = Group("0", (0, 1), "tp")
    assert group == Group("0", (0, 1), "tp")
    assert hash(group) == hash(Group("0", (0, 1), "tp"))
    assert len({group, Group("0", (0, 2), "tp"), Group("1", (0, 1), "tp")}) == 3
    with pytest.raises(AttributeError):
        group.axis = "dp"


def test_events_are_values():
    event = make_event()
    assert event == make_event()
    assert hash(event) == hash(make_event())
    assert event != make_event(phase=Phase.BACKWARD)
    with pytest.raises(AttributeError):
        event.phase = Phase.BACKWARD


def test_defaults_are_a_plain_explicit_forward_event():
    group = Group("0", (0, 1))
    event = CommEvent(Kind.SEND, "c10d.send", "int8", (1,), 1, 1, group)
    assert event[7:] == (Phase.FORWARD, GLOBAL, False, None, None, False, False)


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        (Phase.FORWARD, "forward"),
        (Phase.BACKWARD, "backward"),
        (Phase.RECOMPUTE, "recompute"),
        (Phase.OPTIMIZER, "optimizer"),
    ],
)
def test_phases_read_as_text(phase, text):
    assert phase == text
    assert f"{phase}" == text


def test_check_is_marked_inside_only():
    assert not is_check()
    with marked_as_check():
        assert is_check()
    assert not is_check()


def test_checks_nest():
    with marked_as_check():
        with marked_as_check():
            assert is_check()
        assert is_check()
    assert not is_check()


def test_a_failing_check_leaves_no_mark():
    with pytest.raises(KeyError, match="inside"), marked_as_check():
        raise KeyError("inside")
    assert not is_check()


def test_a_check_can_be_a_decorator():
    decorated = marked_as_check()(is_check)
    assert [decorated(), decorated(), is_check()] == [True, True, False]


def test_another_thread_is_not_in_the_check():
    found = []
    with marked_as_check():
        thread = threading.Thread(target=lambda: found.append(is_check()))
        thread.start()
        thread.join()
    assert found == [False]
