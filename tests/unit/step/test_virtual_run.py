"""Virtual ranks on graphs made by hand: every collective, state, randomness, refusals."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from torchspmd.errors import UsageError, VirtualRanksError
from torchspmd.step import VirtualRanks, run_virtual
from torchspmd.step.graph.metadata import OutputKind, OutputRole, set_roles
from torchspmd.step.graph.reduction_order import reduce_values, ring_chunks
from torchspmd.step.graph.reports import ORDERS

c10d = torch.ops._c10d_functional
aten = torch.ops.aten


def collective(op, *options, num_inputs=1):
    """A graph of one collective and its wait."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{n}") for n in range(num_inputs)]
    start = graph.call_function(op, (inputs if num_inputs > 1 else inputs[0], *options))
    if num_inputs == 1:
        graph.output([graph.call_function(c10d.wait_tensor.default, (start,))])
        return graph
    items = [
        graph.call_function(operator.getitem, (start, n)) for n in range(num_inputs)
    ]
    graph.output([graph.call_function(c10d.wait_tensor.default, (i,)) for i in items])
    return graph


def rows(*shape):
    """A tensor for a rank, its numbers telling the rank."""
    size = torch.Size(shape).numel()
    return lambda rank: torch.arange(size).view(shape).float() + 100 * rank


def run(graph, value, ranks=4, **options):
    result = run_virtual(graph, ranks, inputs=lambda step, rank: value(rank), **options)
    return result.outputs[-1]


def test_all_reduce_gives_each_rank_its_own_tensor():
    found = run(collective(c10d.all_reduce.default, "sum", "0"), lambda r: [rows(2)(r)])
    assert [value.tolist() for (value,) in found] == [[600, 604]] * 4
    found[0][0].zero_()
    assert found[1][0].tolist() == [600, 604]


def test_average_and_largest():
    average = collective(c10d.all_reduce.default, "avg", "0")
    assert run(average, lambda r: [rows(2)(r)])[3][0].tolist() == [150, 151]
    largest = collective(c10d.all_reduce.default, "max", "0")
    assert run(largest, lambda r: [rows(2)(r)])[0][0].tolist() == [300, 301]


def test_gather_and_scatter():
    gather = collective(c10d.all_gather_into_tensor.default, 3, "0")
    found = run(gather, lambda r: [rows(1, 2)(r)])
    assert len(found) == 3  # the graph says how many
    assert found[2][0].tolist() == [[0, 1], [100, 101], [200, 201]]
    scatter = collective(c10d.reduce_scatter_tensor.default, "sum", 2, "0")
    found = run(scatter, lambda r: [rows(4)(r)])
    assert [value.tolist() for (value,) in found] == [[100, 102], [104, 106]]


def test_all_to_all():
    graph = collective(c10d.all_to_all_single.default, [1, 1], [1, 1], "0")
    found = run(graph, lambda r: [rows(2)(r)])
    assert [value.tolist() for (value,) in found] == [[0, 100], [1, 101]]
    shards = fx.Graph()
    x = shards.placeholder("x")
    x.meta["val"] = torch.empty(1, 4)
    node = shards.call_function(
        torch.ops._dtensor.shard_dim_alltoall.default, (x, 0, 1, "0")
    )
    node.meta["val"] = torch.empty(2, 2)
    shards.output([node])
    found = run(shards, lambda r: [rows(1, 4)(r)])
    assert found[1][0].tolist() == [[2, 3], [102, 103]]


def test_uneven_all_to_all_that_does_not_fit():
    graph = collective(c10d.all_to_all_single.default, [2, 1], [1, 1], "0")
    with pytest.raises(VirtualRanksError, match=r"sends \[1, 1\] rows to rank 0"):
        run(graph, lambda r: [rows(2)(r)])


def test_broadcast():
    found = run(collective(c10d.broadcast.default, 2, "0"), lambda r: [rows(2)(r)])
    assert [value.tolist() for (value,) in found] == [[200, 201]] * 4


def test_coalesced_forms():
    graph = collective(c10d.all_reduce_coalesced.default, "sum", "0", num_inputs=2)
    found = run(graph, lambda r: [rows(2)(r), rows(1, 1)(r)])
    assert [value.tolist() for value in found[1]] == [[600, 604], [[600]]]
    graph = collective(
        c10d.all_gather_into_tensor_coalesced.default, 2, "0", num_inputs=2
    )
    found = run(graph, lambda r: [rows(1)(r), rows(1, 1)(r)])
    assert [value.tolist() for value in found[1]] == [[0, 100], [[0], [100]]]
    graph = collective(
        c10d.reduce_scatter_tensor_coalesced.default, "sum", 2, "0", num_inputs=2
    )
    found = run(graph, lambda r: [rows(2)(r), rows(4)(r)])
    assert [value.tolist() for value in found[1]] == [[102], [104, 106]]


def test_a_form_that_writes_in_place():
    mine = [rows(2)(rank) for rank in range(4)]
    graph = collective(c10d.all_reduce_.default, "sum", "0")
    found = run(graph, lambda rank: [mine[rank]])
    assert mine[1].tolist() == found[1][0].tolist() == [600, 604]


@pytest.mark.parametrize("is_first_made", [False, True])
def test_steps_that_write_in_place_leave_earlier_outputs_alone(is_first_made):
    graph = fx.Graph()
    state, more = graph.placeholder("state"), graph.placeholder("more")
    new = graph.call_function(aten.add_.Tensor, (state, more))
    if is_first_made:  # what one step makes, the next writes into
        new = graph.call_function(aten.mul.Tensor, (new, 1))
    whole = graph.call_function(aten.view.default, (new, [1, 2]))
    graph.output([new, whole])
    set_roles(graph, [OutputRole(OutputKind.STATE, 0), OutputRole(OutputKind.RESULT)])
    found = run_virtual(
        graph, 1, steps=3, inputs=lambda step, rank: [torch.zeros(2), torch.ones(2)]
    )
    numbers = [[value.flatten().tolist() for value in row] for (row,) in found.outputs]
    assert numbers == [[[n, n], [n, n]] for n in (1, 2, 3)]
    assert found.inputs[0][0].tolist() == [3, 3]


def test_a_result_that_nobody_waited_for():
    graph = collective(c10d.all_reduce.default, "sum", "0")
    (wait,) = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    start = wait.args[0]
    with graph.inserting_before(wait):
        early = graph.call_function(aten.neg.default, (start,))
    graph.output_node().args = ([wait, early],)
    with pytest.raises(
        VirtualRanksError,
        match="neg_default reads the result of all_reduce_default, which",
    ):
        run(graph, lambda r: [rows(2)(r)])
    wait.append(early)  # after the wait the first tensor is there too
    found = run(graph, lambda r: [rows(2)(r)])
    assert found[0][1].tolist() == [-600, -604]


def test_a_result_on_its_way_to_the_next_run():
    graph = collective(c10d.all_reduce.default, "sum", "0")
    (wait,) = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    graph.output_node().args = ([wait.args[0]],)
    graph.erase_node(wait)
    ranks = VirtualRanks.of(graph)
    inputs = [[rows(2)(rank)] for rank in range(4)]
    with pytest.raises(
        VirtualRanksError, match="output reads the result of all_reduce"
    ):
        ranks.run(graph, inputs)
    started = ranks.run(graph, inputs, keep_started=True)
    later = fx.Graph()
    x = later.placeholder("x")
    later.output([later.call_function(c10d.wait_tensor.default, (x,))])
    assert ranks.run(later, started)[3][0].tolist() == [600, 604]


def test_state_goes_from_step_to_step():
    graph = fx.Graph()
    total, x = graph.placeholder("total"), graph.placeholder("x")
    start = graph.call_function(c10d.all_reduce.default, (x, "sum", "0"))
    wait = graph.call_function(c10d.wait_tensor.default, (start,))
    new = graph.call_function(aten.add.Tensor, (total, wait))
    graph.output([new, wait])
    set_roles(graph, [OutputRole(OutputKind.STATE, 0), OutputRole(OutputKind.RESULT)])

    def inputs(step, rank):
        return [torch.zeros(1), torch.tensor([10.0**step])]

    found = run_virtual(graph, 2, steps=3, inputs=inputs)
    assert [step[1][0].item() for step in found.outputs] == [2, 22, 222]
    assert found.inputs[0][0].item() == 222


def test_made_up_inputs_differ_by_rank_and_come_again():
    graph = collective(c10d.all_reduce.default, "sum", "0")
    (x,) = graph.find_nodes(op="placeholder")
    x.meta["val"] = torch.empty(8)
    first, again = (run_virtual(graph, steps=2, seed=3) for _ in range(2))
    assert torch.equal(first.outputs[1][0][0], again.outputs[1][0][0])
    assert not torch.equal(first.outputs[0][0][0], first.outputs[1][0][0])
    ours, theirs = first.inputs[0][0], first.inputs[1][0]
    assert not torch.equal(ours, theirs)


def test_inputs_of_a_call_stay_valid_on_other_ranks():
    graph = fx.Graph()
    graph.output([graph.placeholder("index"), graph.placeholder("x")])
    index, x = torch.tensor([3, 1, 0, 2]), torch.tensor([1.0, 2.0, 4.0])
    found = run_virtual(graph, 3, inputs=[index, x]).outputs[0]
    assert torch.equal(found[0][0], index) and torch.equal(found[0][1], x)
    for values in found[1:]:
        assert sorted(values[0].tolist()) == [0, 1, 2, 3]
        assert not torch.equal(values[1], x)
        assert bool((values[1] > 0).all())


def test_each_rank_draws_its_own_numbers():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(aten.bernoulli.p, (x, 0.5))])
    before = torch.get_rng_state()
    found = run_virtual(graph, 2, inputs=lambda s, r: [torch.ones(64)], steps=2, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = [value for step in found.outputs for (value,) in step]
    for rank in range(2):
        torch.manual_seed(5 + rank)
        assert torch.equal(drawn[rank], torch.ones(64).bernoulli(0.5))
        assert torch.equal(drawn[2 + rank], torch.ones(64).bernoulli(0.5))
    torch.set_rng_state(before)


def offset_graph(offset):
    graph = fx.Graph()
    x = graph.placeholder("x")
    shifted = graph.call_function(aten.add.Tensor, (x, offset))
    start = graph.call_function(c10d.all_reduce.default, (shifted, "sum", "0"))
    graph.output([graph.call_function(c10d.wait_tensor.default, (start,))])
    return graph


def test_a_graph_for_each_rank():
    graphs = [offset_graph(offset) for offset in (0, 10, 20)]
    found = run(graphs, lambda r: [torch.zeros(1)], ranks=3)
    assert found[0][0].item() == 30
    with pytest.raises(
        UsageError, match="3 graphs and inputs of 4 ranks for 4 virtual"
    ):
        run(graphs, lambda r: [torch.zeros(1)], ranks=4)


def test_graphs_that_would_hang():
    ours, other = offset_graph(0), collective(c10d.broadcast.default, 0, "0")
    with pytest.raises(
        VirtualRanksError, match=r"rank 0 has come to all_reduce_default "
    ):
        run([ours, other], lambda r: [torch.zeros(1)], ranks=2)
    nothing = fx.Graph()
    nothing.output([nothing.placeholder("x")])
    with pytest.raises(
        VirtualRanksError, match="some ranks have ended, others have come"
    ):
        run([ours, nothing], lambda r: [torch.zeros(1)], ranks=2)


def test_constants_of_a_module():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(aten.add.Tensor, (x, graph.get_attr("one")))])
    with pytest.raises(
        VirtualRanksError, match="constant one of a module, and no module"
    ):
        run(graph, lambda r: [torch.zeros(1)])
    root = nn.Module()
    root.register_buffer("one", torch.ones(1))
    assert run(fx.GraphModule(root, graph), lambda r: [torch.zeros(1)])[0][0] == 1


def test_what_is_not_known_is_refused():
    legacy = collective(torch.ops.c10d_functional.all_reduce.default, "sum", "", [0], 1)
    with pytest.raises(VirtualRanksError, match="does not name its group"):
        run(legacy, lambda r: [torch.zeros(1)])
    with pytest.raises(UsageError, match="int has no graph"):
        run_virtual(3)
    with pytest.raises(UsageError, match="order 'star' is not known"):
        run(offset_graph(1), lambda r: [torch.zeros(1)], order="star")
    with pytest.raises(UsageError, match="rank 0 has 2 inputs, the graph takes 1"):
        run(offset_graph(1), lambda r: [torch.zeros(1)] * 2)
    with pytest.raises(UsageError, match="x has no shape in its metadata"):
        run_virtual(offset_graph(1))


def test_a_node_that_fails_is_named():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(aten.view.default, (x, [7]))])
    with pytest.raises(
        VirtualRanksError,
        match=r"view_default \(aten.view.default\) failed with RuntimeError",
    ):
        run(graph, lambda r: [torch.zeros(2)])


def test_sizes_that_the_graph_does_not_have():
    gather = collective(c10d.all_gather_into_tensor.default, 3, "0")
    with pytest.raises(
        UsageError, match=r"group 0=5 is not possible; .* those of 3 ranks"
    ):
        run(gather, lambda r: [torch.zeros(1)], ranks={"group 0": 5})
    with pytest.raises(
        UsageError, match="has no axis tp; it communicates over group 0"
    ):
        run(gather, lambda r: [torch.zeros(1)], ranks={"tp": 2})


# ----------------------------------------------------------------------------
# The three orders of a reduction.


def values(num_ranks, shape, dtype=torch.float32):
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(num_ranks)
    ]


def test_the_orders_of_four_ranks():
    a, b, c, d = (value[0] for value in values(4, (8,)))
    assert reduce_values(values(4, (8,)), "sum", "rank")[0] == ((a + b) + c) + d
    assert reduce_values(values(4, (8,)), "sum", "tree")[0] == (a + b) + (c + d)
    ring = reduce_values(values(4, (8,)), "sum", "ring")
    assert ring[0] == a + (b + (c + d))  # chunk 0 comes down from rank 3 to rank 0
    a, b, c, d = (value[7] for value in values(4, (8,)))
    assert ring[7] == d + (a + (b + c))


def test_an_odd_rank_waits_a_round_in_a_tree():
    a, b, c, d, e = values(5, (3,))
    total = reduce_values([a, b, c, d, e], "sum", "tree")
    assert torch.equal(total, ((a + b) + (c + d)) + e)


def test_two_ranks_show_no_order_and_four_do():
    def totals(num_ranks):
        return [
            reduce_values(values(num_ranks, (1000,)), "sum", order) for order in ORDERS
        ]

    two, four = totals(2), totals(4)
    assert all(torch.equal(two[0], other) for other in two)
    assert not torch.equal(four[0], four[1])
    assert not torch.equal(four[0], four[2])
    assert not torch.equal(four[1], four[2])


@pytest.mark.parametrize("order", ORDERS)
def test_small_floats_are_added_in_their_own_dtype(order):
    one, tiny = torch.ones(4, dtype=torch.bfloat16), torch.full((4,), 2**-9).bfloat16()
    total = reduce_values([one, tiny, tiny, tiny, tiny, tiny], "sum", "rank")
    assert total.dtype == torch.bfloat16
    assert bool((total == 1).all())  # in float32 they would have added up
    found = reduce_values(values(4, (5,), torch.float16), "sum", order)
    assert found.dtype == torch.float16 and found.shape == (5,)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9), st.integers(0, 70), st.sampled_from(["sum", "max", "product"])
)
def test_exact_numbers_have_one_result(num_ranks, size, op):
    whole = [
        torch.randint(-3, 4, (size,), generator=torch.Generator().manual_seed(rank))
        for rank in range(num_ranks)
    ]
    found = [reduce_values(whole, op, order) for order in ORDERS]
    assert all(torch.equal(found[0], other) for other in found)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5_000_000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 17))
def test_chunks_cover_a_buffer_once(num_elements, element_size, num_ranks):
    chunks = ring_chunks(num_elements, element_size, num_ranks)
    assert len(chunks) == num_ranks
    end = 0
    for start, length in chunks:
        assert start == end and length >= 0
        end = start + length
    assert end == num_elements


def test_one_rank_gets_a_tensor_of_its_own():
    value = torch.ones(2)
    for order in ORDERS:
        for op in ("sum", "avg"):
            assert reduce_values([value], op, order) is not value
    assert value.tolist() == [1, 1]


def test_unknown_words():
    with pytest.raises(
        UsageError, match="reduction 'premul' is not known; there are sum"
    ):
        reduce_values(values(2, (1,)), "premul", "rank")
    with pytest.raises(
        UsageError, match="order 'star' is not known; there are rank, ring"
    ):
        reduce_values(values(2, (1,)), "sum", "star")
