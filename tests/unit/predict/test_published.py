"""Tables of published rows: their arithmetic, and that every row is well formed."""

from unittest import mock
from xml.etree import ElementTree as ET

import _published
import pytest
import validate_nanotron
import validate_published
from _host_lead import with_late_frees, without_streams
from _published import SOURCES, Row
from _scatter import scatter

from torchspmd.predict.hardware import load_gpu
from torchspmd.predict.memory import count_memory
from torchspmd.predict.stages import to_rehearse
from torchspmd.predict.timeline import Item, Kind
from torchspmd.rehearse.recording import (
    NOWHERE,
    Alloc,
    Comm,
    Free,
    Mark,
    MarkKind,
    Op,
    Recording,
    RecordStream,
    Synchronize,
    TensorSpec,
)


def row(name, gpus, measured, model=""):
    return Row(
        name, "x", "gpt.py", "h100", "ib-ndr400", gpus, 8, "", 0, measured, model=model
    )


def answer(seconds):
    memory = {"reserved_peak_bytes": 2**30, "device_peak_bytes": 2**30}
    parts = {f"{part}_seconds": 0.0 for part in validate_published._PARTS}
    power = {"clock": 0.9}
    step = {"step_seconds": seconds, "optimizer_seconds": 0.25 * seconds, "mfu": 0.5}
    return {**step, **parts, "power": power, "memory": memory}


def test_a_factor_is_fitted_on_small_rows_only():
    rows = [row("a", 8, 2000), row("b", 64, 2200), row("c", 64, 4000), row("d", 8, 1)]
    table = validate_published.compare(
        rows, [answer(1.0), answer(1.0), answer(2.0), "it failed"]
    )
    assert [each["row"] for each in table] == ["a", "b", "c"]
    assert [each["factor"] for each in table] == pytest.approx([2, 2, 2])
    assert [each["error %"] for each in table] == pytest.approx([-50, -54.5454545, -50])
    errors = [each["with factor, error %"] for each in table]
    assert errors == pytest.approx([0, -9.0909091, 0])
    lines = list(validate_published.summary(table, rows))
    assert lines[0] == "3 of 4 rows were predicted"
    assert (
        "more than 8 GPUs, 2 rows: mean error 52.3 %, nine of ten within 54.5 %"
        in lines[3]
    )


def test_the_predicted_best_layout_is_compared_with_the_true_one():
    rows = [row(name, 64, ms, "m") for name, ms in (("a", 100), ("b", 110), ("c", 90))]
    table = validate_published.compare(rows, [answer(1), answer(0.9), answer(1.1)])
    *_, last = validate_published.summary(table, rows)
    assert last == (
        "best of 3 layouts of m: the predicted one is 22.2 % slower than the true one"
    )


def test_a_figure_without_the_optimizer_is_compared_without_it():
    one = row("a", 1, 750)._replace(has_optimizer=False)
    (entry,) = validate_published.compare([one], [answer(1.0)])
    assert entry["predicted"] == 750


@pytest.mark.parametrize("source", SOURCES)
def test_every_row_names_a_script_and_few_points_of_it(source):
    names = []
    for each in SOURCES[source]():
        names.append(each.name)
        assert (_published.EXAMPLES / each.script).is_file()
        assert 1e-3 < each.seconds < 1e3
        points = validate_published.every_point(each)
        assert 1 <= len(points) <= 4
        layers, batches = points[-1]
        assert layers <= each.layers
        assert batches <= each.accumulate
        ranks = [r.rank for r in validate_published.rehearsals(each, points[0])]
        stages = validate_published.stage_ranks(each)
        assert len(stages) == each.pp
        # Of a long one that is not interleaved, only some.
        few = [stages[stage] for stage in to_rehearse(each.pp)]
        assert ranks == (stages if each.chunks > 1 else few)
        assert max(ranks) < each.gpus
    assert len(names) == len(set(names))


def test_the_picture_has_every_row():
    rows = [row("a <b>", 8, 2000), row("c", 64, 4000)]
    table = validate_published.compare(rows, [answer(1.0), answer(3.0)])
    root = ET.fromstring(scatter(table))
    titles = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [
        "a <b>: 2000 ms, predicted 1000",
        "c: 4000 ms, predicted 3000",
    ]


def test_crashes_and_false_alarms_are_counted():
    rows = list(validate_nanotron.read())
    some = validate_nanotron.choose(rows, 16)
    assert some == validate_nanotron.choose(rows, 16)
    assert len({(each.model, each.gib > 0) for each in some}) == 8
    ran = next(each for each in some if each.gib)
    crashed = next(each for each in some if not each.gib)

    def predicted(gib, fits):
        names = ("allocated", "reserved", "at once")
        memory = {**dict.fromkeys(names, gib), "late": 2 * gib}
        return {"memory": {n: 2**30 * m for n, m in memory.items()}, "fits": fits}

    table = [
        validate_nanotron.compare(ran, predicted(1.1 * ran.gib, "no")),
        validate_nanotron.compare(crashed, predicted(90, "no")),
        validate_nanotron.compare(crashed, predicted(70, "yes")),
    ]
    assert table[0]["error %"] == pytest.approx(10)
    ten = "mean error 10.0 %, median 10.0 %, 0 within 6 %"
    far = "mean error 120.0 %, median 120.0 %, 0 within 6 %"
    both = [f"    as if freed {how}" for how in (f"at once: {ten}", f"late: {far}")]
    both += [f"    whichever is nearer: {ten}"]
    table[0]["MFU %"] = 1.5
    assert list(validate_nanotron.summary(table)) == [
        f"1 that ran: {ten}",
        *both,
        f"1 of them below 2 %: {ten}",
        *both,
        "1 of 1 that ran are said not to fit, 0 at risk",
        "1 of 2 that crashed are said not to fit, 0 at risk",
        f"    {crashed}: 70 GiB, yes",
    ]


def nanotron_row(model, pp):
    return next(
        each
        for each in validate_nanotron.read()
        if (each.model, each.pp) == (model, pp)
    )


def test_the_first_stage_is_rehearsed_and_those_behind_the_layers():
    row = nanotron_row("8.86B", 4)
    first, last = validate_nanotron.rehearsals(row)
    world = 8 * row.nodes
    assert (first.rank, last.rank) == (0, world - world // 4)
    apart = nanotron_row("1.34B", 8)  # norm and head on one stage, the loss on the next
    ranks = [each.rank for each in validate_nanotron.rehearsals(apart)]
    assert ranks == [stage * apart.nodes for stage in (0, 6, 7)]


def test_the_head_counts_as_layers_of_the_last_stage():
    # Of 1.34B, the head multiplies as much as four layers do; the embedding is block 0.
    assert validate_nanotron.stages(nanotron_row("1.34B", 2)) == [
        range(11),
        range(11, 21),
    ]
    assert not validate_nanotron.is_refused(nanotron_row("1.34B", 8))
    *_, loss, nothing = validate_nanotron.stages(nanotron_row("1.34B", 16))
    assert (loss, nothing) == (range(20, 21), range(0))
    assert validate_nanotron.is_refused(nanotron_row("1.34B", 16))
    few = nanotron_row("1.34B", 8)._replace(accumulate=6)
    assert validate_nanotron.is_refused(few)
    assert not validate_nanotron.is_refused(few._replace(accumulate=7))


def test_equal_layouts_tell_each_other():
    some = nanotron_row("1.34B", 2)._replace(dp=4, zero=0, accumulate=8, gib=10.0)
    others = [
        some._replace(dp=8, accumulate=16, gib=12.5),
        some._replace(dp=1, gib=50.0),  # without buckets
        some._replace(zero=1, gib=50.0),
        some._replace(accumulate=2, gib=50.0),
        some._replace(gib=0.0),
    ]
    errors = "mean error 22.5 %, median 22.5 %, 0 within 6 %"
    assert list(validate_nanotron.twins([some, *others])) == [
        f"2 runs in 1 groups with equal tensors, {title}"
        for title in (f"all: {errors}", f"pipeline: {errors}")
    ]


SPEC = TensorSpec((1,), (1,), "bfloat16", "cuda", 0)


def kernel(number):
    return Op(number, "aten.mm.default", (SPEC,), (SPEC,), (), 0, NOWHERE)


def gather(number, is_async=False):
    return Comm(
        number,
        "all_gather",
        "c10d.all_gather",
        "tp",
        (0, 1),
        None,
        2,
        "bfloat16",
        (SPEC,),
        (SPEC,),
        0,
        5,
        is_async,
        -1,
        NOWHERE,
    )


def late_frees(events, **kwargs):
    """Events as they are told to the allocator; kernels and collectives take 1 s each.

    The host needs an eighth of a second for each of them.
    """
    items = [
        Item(0.125, event, 1.0, Kind.COMPUTE, place=place)
        for place, event in enumerate(events)
        if isinstance(event, Op | Comm)
    ]
    with mock.patch("_host_lead.price_events", return_value=mock.Mock(items=items)):
        recording = with_late_frees(Recording(events=events), mock.Mock(), **kwargs)
    return recording.events


def place_of_return(events):
    """How many kernels and collectives were launched when the block came back."""
    place = next(
        place
        for place, event in enumerate(events)
        if isinstance(event, Synchronize) and event.reason == "the host asks"
    )
    return sum(isinstance(event, Op | Comm) for event in events[:place])


def test_memory_that_nccl_uses_comes_back_when_the_host_learns_it():
    used, free = RecordStream(7, 3), Free(7)
    alloc, other = Alloc(7, 512, 0, -1, NOWHERE), Free(8)
    wait = Synchronize(0, None, "stream")
    first, *kernels = gather(0), *map(kernel, range(1, 4))
    events = [alloc, used, first, free, other, *kernels[:2], wait, kernels[2]]
    told = late_frees(events)
    own = next(e.stream for e in told if isinstance(e, RecordStream))
    assert own != used.stream
    assert told == [
        alloc,
        first,
        RecordStream(7, own),
        free,
        other,
        *kernels[:2],
        Synchronize(own, None, "the host asks"),
        wait,
        kernels[2],
    ]
    assert without_streams(Recording(events=events)).events == [alloc, *events[2:]]


def test_memory_waits_for_collectives_before_it_was_freed_and_not_for_kernels():
    alloc, used, free = Alloc(7, 512, 0, -1, NOWHERE), RecordStream(7, 3), Free(7)
    many = list(map(kernel, range(2, 40)))
    # The collective ends at 1.13 s, when the host launches the tenth; a kernel that is
    # launched before the block is freed changes nothing.
    assert place_of_return(late_frees([alloc, used, gather(0), free, *many])) == 9
    beside = [alloc, used, gather(0, is_async=True), kernel(1), free, *many]
    assert place_of_return(late_frees(beside)) == 9
    before = [alloc, used, kernel(1), gather(0), free, *many]
    assert place_of_return(late_frees(before)) == 16


def test_a_collective_waits_for_the_slowest_host():
    alloc, used, free = Alloc(7, 512, 0, -1, NOWHERE), RecordStream(7, 3), Free(7)
    many = list(map(kernel, range(2, 80)))
    wait = Synchronize(None, None, "torch.cuda.synchronize")
    events = [alloc, used, gather(0), free, *many]
    once, often = (late_frees(events, repeats=repeats) for repeats in (1, 400))
    # The slowest is behind by 20 times as long as this one took: 2.5 s.
    assert (place_of_return(once), place_of_return(often)) == (9, 28)
    together = [alloc, used, kernel(90), wait, gather(0), free, *many]
    assert place_of_return(late_frees(together, repeats=400)) == 29


def test_the_host_waits_when_its_queue_is_full():
    alloc, used, free = Alloc(7, 512, 0, -1, NOWHERE), RecordStream(7, 3), Free(7)
    many = list(map(kernel, range(1, 2000)))
    events = [alloc, used, *many[:9], gather(0), free, *many[9:]]
    assert place_of_return(late_frees(events)) == 80  # the collective ends at 10.125 s
    with mock.patch("_host_lead._QUEUE", 20):
        # Of 20 entries the collective has five: the host waits for it behind 15 others.
        assert place_of_return(late_frees(events)) == 25


def test_memory_counts_from_the_last_reset_of_peaks():
    gib = 2**30

    def alloc(storage, nbytes):
        return Alloc(storage, nbytes, 0, -1, NOWHERE)

    reset = Mark(MarkKind.RESET_PEAK, 0)
    empty = Mark(MarkKind.EMPTY_CACHE, 0)
    events = [alloc(1, 8 * gib), Free(1), empty, alloc(2, 2 * gib), reset]
    account = count_memory(Recording(events=[*events, alloc(3, gib)]), load_gpu("h100"))
    assert account.reserved_peak == 8 * gib
    assert validate_nanotron.logged(account) == 3 * gib


def test_a_crash_is_not_for_memory_where_what_takes_as_much_ran():
    ran = validate_nanotron.Row("80B", 8, 4, 8, 2, 4, 8, 1, 60.0, 9.0)
    crashed = ran._replace(micro_batch=2, accumulate=16, gib=0.0, mfu=0.0)
    assert validate_nanotron.is_contradicted(crashed, [ran, crashed])
    larger = crashed._replace(micro_batch=8)
    assert not validate_nanotron.is_contradicted(larger, [ran, larger])
    elsewhere = crashed._replace(tp=4)
    assert not validate_nanotron.is_contradicted(elsewhere, [ran, elsewhere])
    fewer = crashed._replace(dp=1)  # which share the states
    assert not validate_nanotron.is_contradicted(fewer, [ran, fewer])
    more = crashed._replace(dp=16, nodes=64)
    assert validate_nanotron.is_contradicted(more, [ran, more])
    assert not validate_nanotron.is_contradicted(ran, [ran])


def test_the_sample_of_the_docs_is_there():
    rows = [each for source in SOURCES.values() for each in source()]
    for beginning in _published.SAMPLE:
        assert any(each.name.startswith(beginning) for each in rows), beginning
    assert 30 < sum(map(_published.sampled, rows)) < 80
