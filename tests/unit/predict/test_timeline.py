"""The simulated clock on cases that can be worked out by hand."""

import pytest

from torchspmd.errors import UsageError
from torchspmd.predict.account import Part, account_for
from torchspmd.predict.collectives import Link
from torchspmd.predict.timeline import Item, Kind, simulate
from torchspmd.rehearse.recording import (
    Comm,
    EventRecord,
    EventWait,
    Op,
    Phase,
    Site,
    StreamWait,
    Synchronize,
    Wait,
)

SITE = Site("net.layer", Phase.FORWARD, 0, "")


def op(seconds, *, stream=0, host=0.0, number=0):
    event = Op(number, "aten.mm.default", (), (), (), stream, SITE)
    return Item(host, event, seconds, Kind.COMPUTE)


def comm(number, seconds, *, group="dp", link=Link.NVLINK, host=0.0, stream=0, **more):
    streams = {"dp": 10, "tp": 11, "pp": 12}
    event = Comm(
        number=number,
        kind=more.pop("kind", "all_reduce"),
        op="c10d.x",
        group=group,
        ranks=more.pop("ranks", (0, 1)),
        axis=group,
        payload_bytes=100,
        dtype="float32",
        inputs=(),
        outputs=(),
        stream=stream,
        comm_stream=streams[group],
        is_async=more.pop("is_async", True),
        peer=more.pop("peer", -1),
        site=SITE,
    )
    assert not more
    return Item(host, event, seconds, Kind.COMM, link)


def wait(number, stream=0):
    return Item(0.0, Wait(number, stream, SITE))


def event(kind, *arguments):
    return Item(0.0, kind(*arguments))


def account(*items, **kwargs):
    return account_for(simulate([list(items)], **kwargs))


def parts(result):
    return {
        part.value: pytest.approx(s) for part, s in result.parts.items() if s > 1e-12
    }


def test_one_stream_is_the_sum_of_its_operators():
    result = account(op(2.0), op(3.0))
    assert result.seconds == pytest.approx(5.0)
    assert parts(result) == {"compute": 5.0}


def test_a_device_that_is_faster_than_the_host_waits_for_it():
    result = account(op(1.0, host=4.0), op(1.0, host=4.0))
    assert result.seconds == pytest.approx(8.0)
    assert parts(result) == {"compute": 2.0, "host": 6.0}


def test_a_host_that_is_faster_is_not_seen():
    result = account(op(5.0, host=1.0), op(5.0, host=1.0))
    assert result.seconds == pytest.approx(10.0)
    assert parts(result) == {"compute": 10.0}


def test_a_synchronisation_makes_the_host_start_again_from_nothing():
    sync = event(Synchronize, None, None, "torch.cuda.synchronize")
    result = account(op(5.0, host=1.0), op(5.0, host=1.0), sync)
    assert result.seconds == pytest.approx(11.0)
    assert parts(result) == {"compute": 10.0, "host": 1.0}


def test_what_computation_hides_is_not_exposed():
    result = account(op(1.0), comm(1, 3.0), op(4.0), wait(1), op(1.0))
    assert result.seconds == pytest.approx(6.0)
    assert result.communication == pytest.approx(3.0)
    assert result.parts[Part.EXPOSED] == 0


def test_what_it_does_not_hide_is_exposed_and_has_a_cause():
    result = account(op(1.0), comm(1, 3.0), op(1.0), wait(1), op(1.0))
    assert result.seconds == pytest.approx(5.0)
    assert parts(result) == {"compute": 3.0, "exposed": 2.0}
    (entry,) = result.exposed
    assert (entry.axis, entry.kind, entry.module) == ("dp", "all_reduce", "net.layer")
    assert entry.seconds == pytest.approx(2.0)
    assert "longer (3000.00 ms) than the computation" in entry.cause


def test_a_collective_that_is_not_asynchronous_is_all_exposed():
    result = account(op(1.0), comm(1, 3.0, is_async=False), op(1.0))
    assert result.seconds == pytest.approx(5.0)
    assert "as soon as it was issued" in result.exposed[0].cause


def test_collectives_of_one_group_queue():
    gather = comm(1, 3.0, kind="all_gather")
    result = account(gather, comm(2, 1.0), wait(2), op(1.0))
    assert result.seconds == pytest.approx(5.0)
    causes = {each.kind: each.cause for each in result.exposed}
    assert "queued behind all_gather of net.layer" in causes["all_reduce"]


def test_computation_is_slower_while_a_collective_runs():
    result = account(comm(1, 4.0), op(3.0), wait(1), slowdown=1.5)
    # 4 s in which 4 / 1.5 of the work are done, the rest at full speed
    assert result.seconds == pytest.approx(4 + 3 - 4 / 1.5)


def test_a_link_is_shared_and_another_one_is_not():
    both = (wait(1), wait(2), op(1.0))
    shared = account(comm(1, 2.0), comm(2, 2.0, group="tp"), *both)
    assert shared.seconds == pytest.approx(5.0)
    apart = account(comm(1, 2.0), comm(2, 2.0, group="tp", link=Link.NETWORK), *both)
    assert apart.seconds == pytest.approx(3.0)
    # the shorter one ends at 2, the longer one has half of its work left then
    uneven = account(comm(1, 1.0), comm(2, 3.0, group="tp"), *both)
    assert uneven.seconds == pytest.approx(5.0)


def test_streams_share_the_chip_and_events_order_them():
    fork, join = event(StreamWait, 1, 0), event(StreamWait, 0, 1)
    side = (fork, op(2.0, stream=1), op(2.0), join, op(1.0))
    assert account(*side).seconds == pytest.approx(5.0)
    recorded = (
        op(2.0),
        event(EventRecord, 7, 0),
        event(EventWait, 7, 1),
        op(2.0, stream=1),
        event(StreamWait, 0, 1),
        op(1.0),
    )
    assert account(*recorded).seconds == pytest.approx(5.0)


def test_an_event_covers_what_its_stream_waits_for():
    items = (
        comm(1, 3.0),
        wait(1, stream=1),
        event(EventRecord, 7, 1),
        event(EventWait, 7, 0),
        op(1.0),
    )
    result = account(*items)
    assert result.seconds == pytest.approx(4.0)
    assert parts(result) == {"compute": 1.0, "exposed": 3.0}


def test_the_parts_add_up_to_the_step():
    items = [op(1.0, host=0.5), comm(1, 2.5), op(0.5, host=2.0), wait(1), op(1.0)]
    result = account(*items, slowdown=1.1)
    assert sum(result.parts.values()) == pytest.approx(result.seconds)


def stage(micro_batches, first, forward=1.0, backward=2.0):
    """GPipe on one of two stages: all forwards, then all backwards."""
    peer = 1 if first else 0
    pair = {"group": "pp", "ranks": (0, 1), "peer": peer, "is_async": False}
    items = []
    for number in range(micro_batches):
        if first:
            items += [op(forward), comm(number, 0.0, kind="send", **pair)]
        else:
            items += [comm(number, 0.0, kind="recv", **pair), op(forward)]
    for number in range(micro_batches, 2 * micro_batches):
        if first:
            items += [comm(number, 0.0, kind="recv", **pair), op(backward)]
        else:
            items += [op(backward), comm(number, 0.0, kind="send", **pair)]
    return [*items, event(Synchronize, None, None, "the step's end")]


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_a_pipeline_of_two_stages_has_the_bubble_of_the_formula(micro_batches):
    """(stages - 1) / micro-batches of the work, whatever the simulator believes."""
    programs = [stage(micro_batches, first) for first in (True, False)]
    run = simulate(programs, ranks=(0, 1))
    work = 3.0 * micro_batches
    for rank in (0, 1):
        result = account_for(run, rank)
        assert result.seconds == pytest.approx(work + 3.0)
        assert result.parts[Part.BUBBLE] == pytest.approx(3.0)
        assert result.parts[Part.COMPUTE] == pytest.approx(work)


def test_a_rank_that_nobody_joins_is_told():
    alone = [comm(1, 1.0, ranks=(0, 1)), wait(1), op(1.0)]
    with pytest.raises(UsageError, match=r"wait for ever: all_reduce of group dp"):
        simulate([alone, [op(1.0)]], ranks=(0, 1))


def test_the_same_answer_every_time():
    items = [op(0.1, host=0.01 * n) for n in range(50)] + [comm(1, 1.0), wait(1)]
    assert account(*items).seconds == account(*items).seconds


def test_only_what_is_asked_for_is_kept():
    """Of many ranks; what a step takes and is made of does not change."""
    sender = [op(3), comm(1, 0.5, group="pp", kind="send", peer=1), wait(1), op(1)]
    receiver = [comm(1, 0.5, group="pp", kind="recv", peer=0), wait(1), op(2)]
    whole = simulate([sender, receiver], ranks=(0, 1))
    run = simulate([sender, receiver], ranks=(0, 1), of=1)
    assert (run.ends, run.tasks[0]) == (whole.ends, [])
    assert account_for(run, 1).parts == account_for(whole, 1).parts
    assert account_for(run, 1).parts[Part.BUBBLE] > 0
