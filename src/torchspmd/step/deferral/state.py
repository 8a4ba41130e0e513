"""The life of pending updates: its states, its events, and which event leads where.

An exception may come at any moment, and nothing is sure to run after it. So there is no
event for a failure: each state says what holds while it lasts, and that is also what holds
when an exception ends the step in it.

| state | means | after an exception in it |
|---|---|---|
| IDLE | nothing is pending | the iteration can be run again |
| PENDING | updates are pending, none has begun | the iteration can be run again |
| UPDATING | a pending update writes its states | they are lost: load a checkpoint |
| PARTLY_DONE | some pending updates are done | ``flush`` does the rest |
| WRITING | an iteration's results are written | they are lost: load a checkpoint |
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from torchspmd.errors import UsageError


class State(Enum):
    """How far the updates are that an iteration left for the next one."""

    IDLE = "nothing is pending"
    PENDING = "updates are pending"
    UPDATING = "a pending update writes its states"
    PARTLY_DONE = "some pending updates are done and others are not"
    WRITING = "the results of an iteration are written"

    @property
    def is_lost(self) -> bool:
        """Whether an exception in this state leaves states half written."""
        return self in (State.UPDATING, State.WRITING)


class Event(Enum):
    """What happens to pending updates."""

    BEGIN_UPDATE = "begin a pending update"
    END_UPDATE = "end a pending update"
    BEGIN_WRITE = "write the results of an iteration"
    LEAVE = "leave updates for the next iteration"
    FINISH = "leave nothing pending"
    DROP = "drop what is pending"


TRANSITIONS = MappingProxyType(
    {
        (State.PENDING, Event.BEGIN_UPDATE): State.UPDATING,
        (State.PARTLY_DONE, Event.BEGIN_UPDATE): State.UPDATING,
        (State.UPDATING, Event.END_UPDATE): State.PARTLY_DONE,
        (State.IDLE, Event.BEGIN_WRITE): State.WRITING,
        (State.PENDING, Event.BEGIN_WRITE): State.WRITING,
        (State.PARTLY_DONE, Event.BEGIN_WRITE): State.WRITING,
        (State.WRITING, Event.LEAVE): State.PENDING,
        (State.WRITING, Event.FINISH): State.IDLE,  # the last iteration
        (State.UPDATING, Event.FINISH): State.IDLE,  # a flush that wrote its results
        (State.PARTLY_DONE, Event.FINISH): State.IDLE,  # a flush, all of it in place
        **{(state, Event.DROP): State.IDLE for state in State},
    }
)


@dataclass(frozen=True, slots=True)
class PendingUpdates:
    """The state and what belongs to it; replaced as a whole, so never half changed.

    Attributes:
        state: How far the pending updates are.
        carried: The values that they need.
        left: While results are written, the values that the next updates will need.
        done: The regions whose updates are done, by number.
    """

    state: State = State.IDLE
    carried: tuple[Any, ...] = field(default=(), repr=False)
    left: tuple[Any, ...] = field(default=(), repr=False)
    done: frozenset[int] = frozenset()

    def after(self, event: Event, **changes: Any) -> "PendingUpdates":
        """What they are after an event; raises where the event is not possible.

        >>> PendingUpdates(State.UPDATING).after(Event.END_UPDATE).state.name
        'PARTLY_DONE'
        """
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise UsageError(
                f"IterGraphModule: cannot {event.value} while {self.state.value}. Call "
                "flush(), or load a checkpoint, first."
            )
        return (
            PendingUpdates()
            if state is State.IDLE
            else replace(self, state=state, **changes)
        )
