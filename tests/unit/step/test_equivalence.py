"""Which forms of the same computation are proved equal, and which are not."""

import operator

import pytest
import torch
from edit_graphs import NUM_RANKS, GraphBuilder, aten, c10d

from torchspmd.errors import LegalityError
from torchspmd.step.graph.metadata import OutputKind, OutputRole, set_roles
from torchspmd.step.graph.nodes import fake_result
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.legality.check import check_edit

REDUCE = c10d.all_reduce.default
VECTORS = ((8,), (12,))


def build(outputs, shapes, roles=None):
    b = GraphBuilder()
    inputs = [b.input(f"x{i}", *shape) for i, shape in enumerate(shapes)]
    b.graph.output(list(outputs(b, *inputs)))
    if roles is not None:
        set_roles(b.graph, roles)
    return b.graph


def compare(before, after, *shapes, roles=None):
    """Both graphs are made from nothing: no node is known to be the other's."""
    graphs = [build(each, shapes, roles) for each in (before, after)]
    return str(check_edit(*graphs, {}, may_reorder=True))


def reduced_alone(b, *inputs):
    return [b.reduced(each) for each in inputs]


def test_all_reduce_of_a_plain_bucket():
    def bucket(b, x, y):
        flat = [b.call(aten.reshape.default, each, [-1]) for each in (x, y)]
        total = b.reduced(b.call(aten.cat.default, flat))
        one = b.call(aten.slice.Tensor, total, 0, 0, 8)
        two = b.call(aten.narrow.default, total, 0, 8, 12)
        return b.call(aten.view.default, one, [2, 4]), two

    assert compare(reduced_alone, bucket, (2, 4), (12,)) == "proved equal"


@pytest.mark.parametrize("sizes", [(8, 12), (6, 12), (6, 7)])
def test_all_reduce_of_a_bucket_by_rank_with_padding(sizes):
    def bucket(b, *inputs):
        rows, widths = [], []
        for each, size in zip(inputs, sizes, strict=True):
            width = -(-size // NUM_RANKS)
            missing = width * NUM_RANKS - size
            padded = b.call(aten.constant_pad_nd.default, each, [0, missing])
            rows.append(b.call(aten.view.default, padded, [NUM_RANKS, width]))
            widths.append(width)
        joined = b.call(aten.cat.default, rows, 1)
        total = b.reduced(b.call(aten.view.default, joined, [-1]))
        table = b.call(aten.view.default, total, [NUM_RANKS, sum(widths)])
        pieces = b.items(b.call(aten.split_with_sizes.default, table, widths, 1))
        flat = [b.call(aten.reshape.default, piece, [-1]) for piece in pieces]
        return [
            b.call(aten.slice.Tensor, each, 0, 0, size)
            for each, size in zip(flat, sizes, strict=True)
        ]

    proof = compare(reduced_alone, bucket, *((size,) for size in sizes))
    assert proof == "proved equal"


def test_all_gather_of_a_bucket():
    def alone(b, x, y):
        return b.gathered(x), b.gathered(y)

    def bucket(b, x, y):
        flat = b.call(aten.reshape.default, x, [-1])
        whole = b.gathered(b.call(aten.cat.default, [flat, y]))
        table = b.call(aten.unflatten.int, whole, 0, [NUM_RANKS, -1])
        one, two = b.items(b.call(aten.split_with_sizes.default, table, [6, 4], 1))
        return (
            b.call(aten.reshape.default, one, [2 * NUM_RANKS, 3]),
            b.call(aten.flatten.using_ints, two),
        )

    assert compare(alone, bucket, (2, 3), (4,)) == "proved equal"


@pytest.mark.parametrize("rows", [8, 7])  # 7: the last rank's share is padded
def test_reduce_scatter_of_a_bucket(rows):
    def padded(b, x):
        return b.call(aten.constant_pad_nd.default, x, [0, 0, 0, 8 - rows])

    def alone(b, x, y):
        return b.scattered(padded(b, x)), b.scattered(y)

    def bucket(b, x, y):
        tables = [
            b.call(aten.reshape.default, each, [NUM_RANKS, -1])
            for each in (padded(b, x), y)
        ]
        joined = b.call(aten.cat.default, tables, 1)
        share = b.scattered(b.call(aten.view.default, joined, [-1]))
        one, two = b.items(b.call(aten.split.Tensor, share, 6))
        return b.call(aten.view.default, one, [2, 3]), two

    assert compare(alone, bucket, (rows, 3), (16,)) == "proved equal"


def test_a_plain_bucket_is_no_reduce_scatter():
    def alone(b, x, y):
        return b.scattered(x), b.scattered(y)

    def bucket(b, x, y):
        share = b.scattered(b.call(aten.cat.default, [x, y]))
        return b.items(b.call(aten.split_with_sizes.default, share, [2, 3]))

    with pytest.raises(LegalityError, match=r"output 0 \(wait_tensor_default\)"):
        compare(alone, bucket, *VECTORS)


def test_coalesced_collectives_item_by_item():
    def together(b, x, y):
        start = b.graph.call_function(
            c10d.all_reduce_coalesced.default, ([x, y], "sum", "0")
        )
        start.meta["val"] = [x.meta["val"], y.meta["val"]]
        return [b.call(c10d.wait_tensor.default, item) for item in b.items(start)]

    assert compare(reduced_alone, together, *VECTORS) == "proved equal"


def test_what_is_done_to_each_element_may_be_done_to_the_bucket():
    def alone(b, x, y):
        halves = [b.call(aten.div.Tensor, each, 4) for each in reduced_alone(b, x, y)]
        return [b.call(aten._to_copy.default, h, dtype=torch.half) for h in halves]

    def bucket(b, x, y):
        total = b.reduced(b.call(aten.cat.default, [x, y]))
        total = b.call(aten.div.Tensor, total, 4)
        total = b.call(aten._to_copy.default, total, dtype=torch.half)
        return b.items(b.call(aten.split_with_sizes.default, total, [8, 12]))

    assert compare(alone, bucket, *VECTORS) == "proved equal"


def test_lists_item_by_item():
    def one_list(b, x, y, z):
        return b.items(b.call(aten._foreach_mul.List, [x, y], [y, z]))

    def two_lists(b, x, y, z):
        one = b.items(b.call(aten._foreach_mul.List, [y], [z]))
        return [*b.items(b.call(aten._foreach_mul.List, [x], [y])), *one]

    assert compare(one_list, two_lists, (4,), (4,), (4,)) == "proved equal"


def test_views_and_transposes():
    def plain(b, x):
        return x, b.call(aten.t.default, x), b.call(aten.relu.default, x)

    def around(b, x):
        twice = b.call(aten.t.default, b.call(aten.t.default, x))
        permuted = b.call(aten.permute.default, x, [1, 0])
        stacked = b.call(aten.stack.default, b.items(b.call(aten.unbind.int, x)))
        halves = b.items(b.call(aten.chunk.default, stacked, 2, 1))
        joined = b.call(aten.cat.default, halves, 1)
        squeezed = b.call(
            aten.squeeze.dim, b.call(aten.unsqueeze.default, joined, 0), 0
        )
        return twice, permuted, b.call(aten.relu.default, squeezed)

    assert compare(plain, around, (4, 6)) == "proved equal"


def test_columns_cut_in_one_step_or_in_two():
    def one(b, x):
        return [b.call(aten.slice.Tensor, x, 1, 2, 4)]

    def two(b, x):
        left = b.call(aten.slice.Tensor, x, 1, 1, 5)
        return [b.call(aten.slice.Tensor, left, 1, 1, 3)]

    def from_a_bucket(b, x):
        wide = b.call(aten.cat.default, [x, x], 1)
        return [b.call(aten.slice.Tensor, wide, 1, 8, 10)]

    assert compare(one, two, (5, 6)) == "proved equal"
    assert compare(one, from_a_bucket, (5, 6)) == "proved equal"
    with pytest.raises(LegalityError, match="another number or option"):
        compare(one, lambda b, x: [b.call(aten.slice.Tensor, x, 1, 3, 5)], (5, 6))


def test_many_rows_are_kept_together():
    def alone(b, x, y):
        wide = b.call(aten.cat.default, [x, y], 1)
        return b.call(aten.relu.default, wide), b.call(aten.slice.Tensor, wide, 1, 2, 5)

    def turned(b, x, y):
        wide = b.call(aten.cat.default, [x, y], 1)
        return b.call(aten.relu.default, wide), y

    assert compare(alone, turned, (5000, 2), (5000, 3)) == "proved equal"


def test_the_order_of_a_sum_does_not_matter_but_that_of_a_difference_does():
    def forward(op):
        return lambda b, x, y: [b.call(op, x, y)]

    def backward(op):
        return lambda b, x, y: [b.call(op, y, x)]

    for op in (aten.add.Tensor, aten.mul.Tensor):
        assert compare(forward(op), backward(op), (3,), (3,)) == "proved equal"
    with pytest.raises(LegalityError, match="operands in another order"):
        compare(forward(aten.sub.Tensor), backward(aten.sub.Tensor), (3,), (3,))


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(
            lambda b, x: [b.reduced(b.call(aten.div.Tensor, x, 4))], id="scaled before"
        ),
        pytest.param(
            lambda b, x: [b.call(aten.mul.Tensor, b.reduced(x), 0.25)], id="factor"
        ),
        pytest.param(
            lambda b, x: [b.call(aten.div.Tensor, b.gathered(b.scattered(x)), 4)],
            id="scatter and gather",
        ),
    ],
)
def test_what_may_be_the_same_is_said_to_be_not_proved(after):
    proof = compare(
        lambda b, x: [b.call(aten.div.Tensor, b.reduced(x), 4)], after, (8,)
    )
    assert proof == "checked: 1 of 1 outputs not proved: output 0 (div_tensor)"


def test_an_operator_that_does_nothing_may_be_dropped():
    def with_ones(b, x):
        return [b.call(aten.mul.Tensor, x, b.call(aten.ones_like.default, x))]

    assert "not proved" in compare(with_ones, lambda b, x: [x], (3,))
    by_one = compare(
        lambda b, x: [b.call(aten.mul.Tensor, x, 1)], lambda b, x: [x], (3,)
    )
    assert "not proved" in by_one
    for dropped in (lambda b, x: b.call(aten.div.Tensor, x, 4), GraphBuilder.reduced):
        with pytest.raises(LegalityError, match="where x0 is now"):
            compare(lambda b, x, f=dropped: [f(b, x)], lambda b, x: [x], (3,))


def test_a_gather_of_which_only_the_own_part_is_used():
    def own_part(b, x):
        return [b.call(aten.slice.Tensor, b.gathered(x), 0, 2, 4)]

    assert "not proved" in compare(own_part, lambda b, x: [x], (2,))


def test_a_collective_of_one_rank_does_nothing():
    def gathered(b, x):
        return [b.waited(c10d.all_gather_into_tensor.default, x, 1, "alone")]

    assert compare(gathered, lambda b, x: [x], (2,)) == "proved equal"


def half_bucket(order):
    """Two reductions in half precision at once."""

    def bucket(b, *inputs):
        joined = b.call(aten.cat.default, [inputs[i] for i in order])
        low = b.call(aten._to_copy.default, joined, dtype=torch.half)
        total = b.call(aten._to_copy.default, b.reduced(low), dtype=torch.double)
        return b.items(b.call(aten.split.Tensor, total, 4))

    return bucket


def test_reductions_in_another_dtype_are_not_proved():
    assert "2 of 2 outputs not proved" in compare(
        reduced_alone, half_bucket([0, 1]), (4,), (4,)
    )


@pytest.mark.parametrize("order", [[1, 0], [0, 0]])
def test_but_they_still_lose_no_gradient(order):
    with pytest.raises(LegalityError, match="all_reduce_default_1 was where"):
        compare(reduced_alone, half_bucket(order), (4,), (4,))


def test_in_place_form_of_a_state():
    roles = [OutputRole(OutputKind.STATE, 0), OutputRole(OutputKind.RESULT)]

    def functional(b, x, y):
        return b.call(aten.add.Tensor, x, y), b.call(aten.sum.default, x)

    def in_place(b, x, y):
        total = b.call(aten.sum.default, x)
        b.graph.call_function(aten.add_.Tensor, (x, y))
        return x, total

    def too_early(b, x, y):
        b.graph.call_function(aten.add_.Tensor, (x, y))
        return x, b.call(aten.sum.default, x)

    shapes = (3,), (3,)
    assert compare(functional, in_place, *shapes, roles=roles) == "proved equal"
    with pytest.raises(LegalityError, match=r"output 1 .* x0 was where add__tensor"):
        compare(functional, too_early, *shapes, roles=roles)


def test_writes_through_views():
    def functional(b, x, y):
        top, bottom = b.items(b.call(aten.split.Tensor, x, 2))
        return [b.call(aten.cat.default, [y, bottom]), b.call(aten.relu.default, top)]

    def in_place(b, x, y):
        whole = b.call(aten.clone.default, x)
        relu = b.call(aten.relu.default, b.call(aten.slice.Tensor, whole, 0, 0, 2))
        flat = b.call(aten.view.default, whole, [-1])
        part = b.call(aten.slice.Tensor, flat, 0, 0, 6)
        b.graph.call_function(
            aten.copy_.default, (part, b.call(aten.view.default, y, [6]))
        )
        return [whole, relu]

    def columns(b, x, y):
        whole = b.call(aten.clone.default, x)
        part = b.call(aten.select.int, whole, 1, 1)
        b.graph.call_function(aten.zero_.default, (part,))
        return [whole]

    def columns_joined(b, x, y):
        left, _, right = b.items(b.call(aten.split_with_sizes.default, x, [1, 1, 1], 1))
        zero = b.call(aten.zeros_like.default, left)
        return [b.call(aten.cat.default, [left, zero, right], 1)]

    assert compare(functional, in_place, (4, 3), (2, 3)) == "proved equal"
    assert compare(columns, columns_joined, (4, 3), (2, 3)) == "proved equal"


def test_a_new_write_into_an_input():
    def writes(b, x, y):
        b.graph.call_function(aten.add_.Tensor, (y, 1))
        return [b.call(aten.relu.default, x)]

    text = "state: the graph now writes into its input x1, with add__tensor"
    with pytest.raises(LegalityError, match=text):
        compare(lambda b, x, y: [b.call(aten.relu.default, x)], writes, (3,), (3,))


@pytest.mark.parametrize(
    ("target", "sizes", "text"),
    [
        (
            aten.split_with_sizes.default,
            [8, 12],
            "split_with_sizes_default takes pieces of 20 places in all of dimension 0",
        ),
        (
            aten.view.default,
            [4, 5],
            r"view_default takes a shape of \[4, 5\] for 8 elements",
        ),
    ],
)
def test_a_bucket_that_cannot_be_taken_apart(target, sizes, text):
    def short(b, x, y):
        total = b.reduced(b.call(aten.cat.default, [x]))
        pieces = b.graph.call_function(target, (total, sizes))
        made = [b.graph.call_function(operator.getitem, (pieces, i)) for i in (0, 1)]
        for node, like in zip(made, (x, y), strict=True):
            node.meta["val"] = like.meta["val"]
        return made

    with pytest.raises(LegalityError, match=f"shape: {text}"):
        compare(reduced_alone, short, *VECTORS)


@pytest.mark.parametrize(
    ("target", "arguments"),
    [(aten.view.default, lambda n: ([n, 2],)), (aten.split.Tensor, lambda n: (n,))],
)
def test_sizes_that_are_equal_in_the_first_program_only(target, arguments):
    """Sizes are numbers in what is noted of nodes, and nodes among their arguments."""
    b = GraphBuilder()
    x, n, m = b.input("x", 4), b.graph.placeholder("n"), b.graph.placeholder("m")
    n.meta["val"] = m.meta["val"] = 2
    made = b.graph.call_function(target, (x, *arguments(n)))
    made.meta["val"] = fake_result(made, {x: x.meta["val"], n: 2})
    b.graph.output([made])
    before, mapping = copy_graph(b.graph)
    assert str(check_edit(before, b.graph, mapping)) == "proved equal"
    made.args = (x, *arguments(m))
    with pytest.raises(LegalityError, match="another value: n was where m is now"):
        check_edit(before, b.graph, mapping)


def test_numbers_are_told_apart_by_type():
    def scaled(number):
        return lambda b, x: [b.call(aten.mul.Tensor, x, number)]

    for other in (3, 2.0, True):
        with pytest.raises(LegalityError, match="another number or option"):
            compare(scaled(2), scaled(other), (3,))


def test_random_draws_are_told_apart():
    b = GraphBuilder()
    x = b.input("x", 3)
    one, two = (b.call(aten.bernoulli.p, x, 0.5) for _ in range(2))
    b.graph.output([one, two])
    before, mapping = copy_graph(b.graph)
    assert str(check_edit(before, b.graph, mapping)) == "proved equal"
    b.graph.output_node().args = ([two, one],)
    with pytest.raises(LegalityError, match="bernoulli_p was where bernoulli_p_1"):
        check_edit(before, b.graph, mapping)
    b.graph.output_node().args = ([one, two],)
    one.prepend(two)
    text = "random: bernoulli_p_1 takes the random numbers that bernoulli_p took"
    with pytest.raises(LegalityError, match=text):
        check_edit(before, b.graph, mapping)
