"""Random groups, events and ledgers for the tests of this folder."""

from hypothesis import strategies as st

from torchspmd.comm import CommEvent, Group, Kind, Ledger, Phase

_names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_optional = st.none() | _names

groups = st.builds(
    Group,
    name=_names,
    ranks=st.lists(st.integers(0, 9), max_size=4, unique=True).map(tuple),
    axis=st.none() | st.sampled_from(["dp", "tp"]),
)
modules = st.sampled_from(["Global", "GPT", "GPT.h", "GPT.h.0", "GPT.h2"]) | _names
events = st.builds(
    CommEvent,
    kind=st.sampled_from(list(Kind)),
    op=st.sampled_from(["c10d.allreduce_", "c10d_functional.all_reduce"]),
    dtype=st.sampled_from(["float32", "bfloat16", "mixed"]),
    shape=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    payload_bytes=st.integers(0, 2**70),
    wire_bytes=st.integers(0, 2**70),
    group=groups,
    phase=st.sampled_from(list(Phase)),
    module=modules,
    implicit=st.booleans(),
    cause=_optional,
    source=_optional,
    compiled=st.booleans(),
    check=st.booleans(),
)


@st.composite
def ledgers(draw):
    ledger = Ledger(max_events=draw(st.integers(0, 8)))
    for event in draw(st.lists(events, max_size=12)):
        ledger.append(event)
    for text in draw(st.lists(_names, max_size=3)):
        ledger.note(text, draw(st.integers(1, 5)))
    return ledger


def make_event(
    kind=Kind.ALL_REDUCE,
    payload=128,
    wire=192,
    *,
    op="c10d_functional.all_reduce",
    axis="tp",
    **fields,
):
    group = Group(name="0", ranks=(0, 1, 2, 3), axis=axis)
    return CommEvent(kind, op, "float32", (8, 4), payload, wire, group, **fields)


def make_ledger(*recorded, max_events=100):
    ledger = Ledger(max_events=max_events)
    for event in recorded:
        ledger.append(event)
    return ledger
