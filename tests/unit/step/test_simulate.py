"""A simulated iteration is that of many iterations, one behind the other."""

import random

import pytest
from torch import fx

from torchspmd.step.graph.simulate import Do, Work, run_schedule

GROUPS = ("tp", "dp")


def random_schedule(seed):
    """Work with collectives that are waited for in this or in the next iteration."""
    chance, graph = random.Random(seed), fx.Graph()
    size = chance.randrange(1, 40)
    work = [Work(Do.COMPUTE, chance.random()) for _ in range(size)]
    for number in range(chance.randrange(8)):
        start = graph.placeholder(f"start_{number}")
        seconds, group = 4 * chance.random(), chance.choice(GROUPS)
        first = chance.randrange(len(work) + 1)
        work.insert(first, Work(Do.START, seconds, start, group))
        kind = chance.choice((Do.WAIT, Do.WAIT_CARRIED))
        low = first + 1 if kind is Do.WAIT else 0
        place = chance.randrange(low, len(work) + 1)
        work.insert(place, Work(kind, start=start))
    return work


def unrolled(work, slowdown, count=60):
    """The last of some iterations in absolute time: how long it is, and what waits."""
    now, ends, free = 0.0, {}, {}
    begun, exposed = 0.0, 0.0
    for iteration in range(count):
        begun, exposed = now, 0.0
        for do, seconds, start, group in work:
            if do is Do.COMPUTE:
                now += seconds
            elif do is Do.START:
                free[group] = max(now, free.get(group, 0.0)) + seconds * slowdown
                ends[iteration, start] = free[group]
            else:
                started = iteration - (do is Do.WAIT_CARRIED)
                waiting = max(0.0, ends.get((started, start), 0.0) - now)
                now, exposed = now + waiting, exposed + waiting
    return now - begun, exposed


@pytest.mark.parametrize("slowdown", [1.0, 1.3])
@pytest.mark.parametrize("seed", range(150))
def test_random_schedules(seed, slowdown):
    work = random_schedule(seed)
    found = run_schedule(work, slowdown=slowdown)
    seconds, exposed = unrolled(work, slowdown)
    assert found.seconds == pytest.approx(seconds)
    waits = [max(0.0, flight.end - flight.needed) for _, flight in found.flights]
    assert sum(waits) == pytest.approx(exposed)
    busy = sum(each.seconds for each in work if each.do is Do.START) * slowdown
    assert sum(found.busy.values()) == pytest.approx(busy)


def test_a_wire_that_falls_behind_step_by_step():
    """What is hidden at first is exposed once enough of it is left from before."""
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    work = [
        Work(Do.START, 0.5, first, "dp"),
        Work(Do.COMPUTE, 1.0),
        Work(Do.START, 0.6, second, "dp"),
        Work(Do.WAIT_CARRIED, start=second),
    ]
    assert run_schedule(work).seconds == pytest.approx(1.1)


def test_a_second_wait_takes_nothing():
    start = fx.Graph().placeholder("start")
    begin, wait = Work(Do.START, 2.0, start, "dp"), Work(Do.WAIT, start=start)
    found = run_schedule([begin, Work(Do.COMPUTE, 0.5), wait, wait])
    assert found.seconds == 2.0
    assert len(found.flights) == 1
