"""Live bytes and the peak are one computation, also with collectives in flight."""

import pytest
import torch
from comm_graphs import all_reduce, captured, ops

from torchspmd.step.graph.collectives import reduce_in_place
from torchspmd.step.graph.memory import LiveBytes, predict_peak
from torchspmd.step.passes import comm_fusion_with_concat
from torchspmd.testing import fake_world

K = 1024
X = torch.ones(K // 4)


def reduced(x):
    start = ops.all_reduce(x * 2, "sum", "0")
    beside = x + 1  # while the reduction is in flight
    return [ops.wait_tensor(start), beside]


def gathered(x):
    start = ops.all_gather_into_tensor(x * 2, 2, "0")
    beside = x + 1
    return [ops.wait_tensor(start), beside]


def scattered(x):
    start = ops.reduce_scatter_tensor(x * 2, "sum", 2, "0")
    beside = x + 1
    return [ops.wait_tensor(start), beside]


def viewed(x):
    whole = ops.wait_tensor(ops.all_gather_into_tensor(x * 2, 2, "0"))
    return [whole.view(2, -1).sum()]


def sorted_twice(x):
    values, places = (x * 2).sort()  # 1 K, and 2 K of int64
    return [values.exp().sum(), places]


# By node: mul, start, add (beside), wait, output. In K.
CASES = {
    # All-reduce clones its input, which is free once it has started.
    "all_reduce": (reduced, False, [1, 2, 2, 2, 2]),
    # In place there is no other memory.
    "all_reduce_": (reduced, True, [1, 1, 2, 2, 2]),
    # These read their input until the wait.
    "all_gather": (gathered, False, [1, 3, 4, 4, 3]),
    "reduce_scatter": (scattered, False, [1, 1.5, 2.5, 2.5, 1.5]),
    # mul, start, wait, view, sum, output: a view is the memory that it shows.
    "view": (viewed, False, [1, 3, 3, 2, 2, 0]),
    # mul; sort and its items: nothing is freed before the last is taken; exp; sum; output
    "items": (sorted_twice, False, [1, 4, 3, 3, 4, 3, 2]),
}


@pytest.mark.parametrize("name", CASES)
def test_live_bytes_and_the_peak(name):
    function, in_place, expected = CASES[name]
    with fake_world(2):
        gm = captured(function, X)
        if in_place:
            assert reduce_in_place(gm.graph) == 1
        live = LiveBytes(gm.graph).now()
        found = [round(size / K, 1) for size in live.values()][1:]  # without the input
        assert found == expected
        peak = predict_peak(gm.graph)
    assert peak.total_bytes == K + max(live.values())  # and the input
    assert sum(peak.alive.values()) == peak.total_bytes
    assert live[next(n for n in gm.graph.nodes if n.name == peak.node)] == max(
        live.values()
    )


def test_a_bucket():
    def two(x):
        first, second = all_reduce(x * 2), all_reduce(x * 3)
        return [first + 1, second + 1]

    with fake_world(2):
        gm = captured(two, X)
        comm_fusion_with_concat(gm, 25)
        live = {node.name: size / K for node, size in LiveBytes(gm.graph).now().items()}
        peak = predict_peak(gm.graph)
    (packed,) = (name for name in live if name.startswith("cat"))
    assert live[packed] == 4  # two gradients, and their bucket
    assert live["all_reduce_default"] == 4  # the bucket and its copy
    assert live["wait_tensor_default"] == 2  # the copy alone
    assert peak.total_bytes == K + 4 * K
