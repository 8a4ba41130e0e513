"""Wrong edits, made at random; ``NoPlaceError`` where a graph has no place for one."""

import itertools
import operator

from edit_graphs import aten, c10d
from edit_moves import COALESCED, WAIT, starts_of
from torch import fx

_PACKING = (aten.cat.default, *COALESCED.values())


class NoPlaceError(Exception):
    """Another graph may have one."""


def _shape(node):
    return tuple(getattr(node.meta.get("val"), "shape", ("no tensor", node.name)))


def _calls(graph):
    return [node for node in graph.nodes if node.op == "call_function"]


def _choose(random, items):
    items = list(items)
    if not items:
        raise NoPlaceError
    return random.choice(items)


def swap_operands(graph, random):
    """Two operands of one operator, of the same shape."""
    places = [
        (node, one, two)
        for node in _calls(graph)
        for one, two in itertools.combinations(node.all_input_nodes, 2)
        if _shape(one) == _shape(two)
    ]
    node, one, two = _choose(random, places)
    swap = {one: two, two: one}
    node.args, node.kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda each: swap.get(each, each)
    )


def take_another_value(graph, random):
    """A value of the same shape that was computed earlier."""
    node = _choose(random, [n for n in _calls(graph) if n.target is not WAIT])
    source = _choose(random, node.all_input_nodes)
    earlier = [
        n
        for n in graph.nodes
        if n < node
        and n is not source
        and _shape(n) == _shape(source)
        and n not in starts_of(graph)
        and operator.getitem is not n.target
    ]
    other = _choose(random, earlier)
    node.replace_input_with(source, other)


def repeat_a_member(graph, random):
    """A bucket or list that holds one tensor twice and another one never."""
    places = [
        (node, i, j)
        for node in _calls(graph)
        if node.target in _PACKING
        or getattr(node.target, "__name__", "").startswith("_f")
        for i, one in enumerate(node.args[0])
        for j, two in enumerate(node.args[0])
        if i != j and _shape(one) == _shape(two)
    ]
    node, i, j = _choose(random, places)
    members = list(node.args[0])
    members[i] = members[j]
    node.args = (members, *node.args[1:])


def reorder_members(graph, random):
    """A bucket whose members are packed in another order than they are unpacked."""
    node = _choose(random, [n for n in _calls(graph) if n.target in _PACKING])
    members = list(node.args[0])
    random.shuffle(members)
    node.args = (members, *node.args[1:])


def lose_a_member(graph, random):
    """A bucket that holds one tensor less."""
    node = _choose(random, [n for n in _calls(graph) if n.target in _PACKING])
    members = list(node.args[0])
    del members[random.randrange(len(members))]
    node.args = (members, *node.args[1:])


def take_another_item(graph, random):
    """The wrong piece of a bucket, or the wrong item of a list."""
    node = _choose(random, [n for n in _calls(graph) if n.target is operator.getitem])
    count = len(node.args[0].meta["val"])
    places = [i for i in range(count) if i != node.args[1]]
    node.args = (node.args[0], _choose(random, places))


def cut_elsewhere(graph, random):
    """Pieces of a bucket that begin and end at other places."""
    splits = [n for n in _calls(graph) if n.target is aten.split_with_sizes.default]
    node = _choose(random, splits)
    sizes = list(node.args[1])
    sizes.reverse()
    node.args = (node.args[0], sizes, *node.args[2:])


def change_a_number(graph, random):
    """Another factor, another reduction, another layout."""
    places = [
        (node, i)
        for node in _calls(graph)
        for i, each in enumerate(node.args)
        if type(each) is float or each in ("sum", "avg")
    ]
    node, i = _choose(random, places)
    args, other = list(node.args), {"sum": "avg", "avg": "sum"}
    args[i] = other[args[i]] if isinstance(args[i], str) else args[i] * 1.5
    node.args = tuple(args)


def skip_a_reduction(graph, random):
    """The gradient of this rank in place of the sum."""
    starts = starts_of(graph, c10d.all_reduce.default)
    start = _choose(random, [n for n in starts if next(iter(n.users)).target is WAIT])
    next(iter(start.users)).replace_all_uses_with(start.args[0])


def swap_outputs(graph, random):
    output = graph.output_node()
    values = list(output.args[0])
    i, j = random.sample(range(len(values)), 2)
    values[i], values[j] = values[j], values[i]
    output.args = (values,)


def drop_an_output(graph, random):
    output = graph.output_node()
    values = list(output.args[0])
    del values[random.randrange(len(values))]
    output.args = (values,)


def drop_a_wait(graph, random):
    wait = _choose(random, [n for n in _calls(graph) if n.target is WAIT])
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)


def wait_twice(graph, random):
    wait = _choose(random, [n for n in _calls(graph) if n.target is WAIT])
    source = random.choice([wait, wait.args[0]])
    with graph.inserting_after(wait):
        again = graph.call_function(WAIT, (source,))
    again.meta = dict(wait.meta)
    user = _choose(random, [user for user in wait.users if user is not again])
    user.replace_input_with(wait, again)


def reorder_collectives(graph, random):
    """A collective that starts before the one that it followed on its group."""
    places = [
        (one, two)
        for one in starts_of(graph)
        for two in starts_of(graph)
        if one < two
        and one.args[-1] == two.args[-1]
        and all(source < one for source in two.all_input_nodes)
    ]
    one, two = _choose(random, places)
    one.prepend(two)


def move_over_a_write(graph, random):
    """A read that stands on the other side of a write to what it reads."""
    places = [
        (read, write)
        for write in _calls(graph)
        if getattr(write.target, "__name__", "").partition(".")[0].endswith("_")
        for target in write.args[0]
        for read in target.users
        if read not in (write, graph.output_node()) and not _is_between(read, write)
    ]
    read, write = _choose(random, places)
    (write.append if read < write else write.prepend)(read)


def _is_between(read, write):
    """Whether something needs a read to stand on its side of a write."""
    if read < write:
        return any(user < write for user in read.users) or write in read.users
    return any(write < source for source in read.all_input_nodes)


# Wrong whatever the numbers are.
STRUCTURAL = (drop_an_output, drop_a_wait, wait_twice, reorder_collectives)
# Wrong where the outputs differ.
OF_VALUES = (
    swap_operands,
    take_another_value,
    repeat_a_member,
    reorder_members,
    lose_a_member,
    take_another_item,
    cut_elsewhere,
    change_a_number,
    skip_a_reduction,
    swap_outputs,
)
