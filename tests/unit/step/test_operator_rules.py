"""Which elements each rule of the legality check says an operator gives: as torch does."""

import pytest
import torch
from edit_graphs import GraphBuilder, aten

from torchspmd.step.graph.aliases import find_written
from torchspmd.step.legality.evaluate import Evaluation
from torchspmd.step.legality.values import FILL, INPUT, Flat, ValueTable

PADDING = -1.0

# The shapes of tensors, the operator, whether it takes them as a list, other arguments.
ROWS = [
    ([(2, 6)], aten.view.default, False, ([3, -1],)),
    ([(2, 6)], aten.reshape.default, False, ([12],)),
    ([(2, 6)], aten._unsafe_view.default, False, ([4, 3],)),
    ([(2, 3, 4)], aten.flatten.using_ints, False, (1, -1)),
    ([()], aten.flatten.using_ints, False, ()),
    ([(6, 2)], aten.unflatten.int, False, (0, [3, -1])),
    ([(1, 3, 1)], aten.squeeze.default, False, ()),
    ([(1, 3, 1)], aten.squeeze.dim, False, (-1,)),
    ([(1, 3, 1)], aten.squeeze.dims, False, ([0, 1],)),
    ([(2, 3)], aten.unsqueeze.default, False, (-1,)),
    ([(2, 3)], aten.expand.default, False, ([-1, 3],)),
    ([(2, 3)], aten.clone.default, False, ()),
    ([(4, 5)], aten.slice.Tensor, False, (0, 1, 3)),
    ([(4, 5)], aten.slice.Tensor, False, (1, -3, 9)),
    ([(4, 5)], aten.slice.Tensor, False, (1, 4, 2)),
    ([(4, 5)], aten.narrow.default, False, (1, -2, 2)),
    ([(4, 5)], aten.select.int, False, (1, -1)),
    ([(3, 2, 2)], aten.select.int, False, (0, 1)),
    ([(4, 5)], aten.unbind.int, False, (1,)),
    ([(5, 2)], aten.split.Tensor, False, (2,)),
    ([(2, 5)], aten.split.Tensor, False, (3, -1)),
    ([(6,)], aten.split_with_sizes.default, False, ([1, 0, 5],)),
    ([(7, 2)], aten.chunk.default, False, (3,)),
    ([(2, 5)], aten.chunk.default, False, (4, 1)),
    ([(2, 3), (4, 3)], aten.cat.default, True, ()),
    ([(2, 3), (0,), (2, 1)], aten.cat.default, True, (-1,)),
    ([(2, 3), (2, 3)], aten.stack.default, True, (1,)),
    ([(2, 3)], aten.constant_pad_nd.default, False, ([1, 2, 0, 1], PADDING)),
    ([(2, 3)], aten.t.default, False, ()),
    ([(2, 3, 4)], aten.transpose.int, False, (0, -1)),
    ([(2, 3, 4)], aten.permute.default, False, ([2, 0, 1],)),
]


def numbered(shapes):
    """Tensors whose elements are all different."""
    first, tensors = 0, []
    for shape in shapes:
        size = torch.Size(shape).numel()
        tensors.append(torch.arange(first, first + size).double().reshape(shape))
        first += size
    return tensors


def elements(table, value, tensors):
    """What is in a value, if these tensors are given."""
    flat = table[value]
    if not isinstance(flat, Flat):
        return [
            each for child in flat.children for each in elements(table, child, tensors)
        ]
    return [
        of_atom(table, segment.atom, segment.offset + place, tensors)
        for segment in table.segments(value)
        for place in range(segment.length)
    ]


def of_atom(table, atom, place, tensors):
    term, runs = table[atom], table.runs_of(atom)
    if runs is not None:
        number, rest = divmod(place, runs.length)
        place = runs.offset + number * runs.stride + rest
        return of_atom(table, runs.base, place, tensors)
    if term.head == FILL:
        return PADDING
    if term.head == INPUT:
        return tensors[term.attributes].reshape(-1)[place].item()
    assert term.head == "permute"
    (child,) = term.children
    whole = torch.tensor(elements(table, child, tensors)).reshape(table[child].shape)
    return whole.permute(term.attributes).reshape(-1)[place].item()


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(("shapes", "target", "as_list", "rest"), ROWS)
def test_as_torch_does(shapes, target, as_list, rest, is_cut):
    """On whole tensors, and on tensors that were cut out of others."""
    around = [(*s[:-1], s[-1] + 2) if s and is_cut else s for s in shapes]
    given = numbered(around)
    b = GraphBuilder()
    inputs = [b.input(f"x{i}", *shape) for i, shape in enumerate(around)]
    nodes, tensors = list(inputs), list(given)
    for place, shape in enumerate(shapes):
        if shape and is_cut:
            cut = (-1, 1, shape[-1] + 1)
            part = b.call(aten.slice.Tensor, nodes[place], *cut)
            dense = {"memory_format": torch.contiguous_format}  # any view is possible
            nodes[place] = b.call(aten.clone.default, part, **dense)
            tensors[place] = aten.slice.Tensor(tensors[place], *cut).contiguous()
    made = b.call(target, *([nodes] if as_list else nodes), *rest)
    found = target(*([tensors] if as_list else tensors), *rest)
    table, fakes = ValueTable(), {node: node.meta["val"] for node in b.graph.nodes}
    run = Evaluation(table, b.graph, {}, fakes, find_written(b.graph))
    assert not run.impossible
    results = found if isinstance(found, (list, tuple)) else [found]
    expected = [number for each in results for number in each.reshape(-1).tolist()]
    assert elements(table, run.value(made), given) == expected
