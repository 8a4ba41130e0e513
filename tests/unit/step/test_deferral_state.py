"""The life of pending updates: every event in every state."""

import itertools

import pytest
import torch

from torchspmd.errors import UsageError
from torchspmd.step.deferral.state import TRANSITIONS, Event, PendingUpdates, State

# In the order of the events: where each leads; "-" where it is refused.
TABLE = """
              BEGIN_UPDATE END_UPDATE  BEGIN_WRITE LEAVE   FINISH DROP
IDLE          -            -           WRITING     -       -      IDLE
PENDING       UPDATING     -           WRITING     -       -      IDLE
UPDATING      -            PARTLY_DONE -           -       IDLE   IDLE
PARTLY_DONE   UPDATING     -           WRITING     -       IDLE   IDLE
WRITING       -            -           -           PENDING IDLE   IDLE
"""


def rows():
    events, *lines = (line.split() for line in TABLE.strip().splitlines())
    for state, *results in lines:
        for event, result in zip(events, results, strict=True):
            yield State[state], Event[event], None if result == "-" else State[result]


def test_the_table_names_every_pair_once():
    pairs = [(state, event) for state, event, _ in rows()]
    assert pairs == list(itertools.product(State, Event))


@pytest.mark.parametrize(("state", "event", "result"), [*rows()])
def test_where_an_event_leads(state, event, result):
    before = PendingUpdates(state, carried=(1,), left=(2,), done=frozenset({0}))
    if result is None:
        assert (state, event) not in TRANSITIONS
        text = f"cannot {event.value} while {state.value}. Call"
        with pytest.raises(UsageError, match=text):
            before.after(event)
        return
    after = before.after(event)
    assert after.state is result
    if result is State.IDLE:
        assert after == PendingUpdates()  # nothing is kept


def test_which_states_an_exception_loses():
    assert [state.name for state in State if state.is_lost] == ["UPDATING", "WRITING"]


def test_pending_updates_do_not_print_values():
    text = repr(PendingUpdates(State.PENDING, (torch.tensor([1.5]),), (torch.ones(1),)))
    assert "PENDING" in text and "tensor" not in text
