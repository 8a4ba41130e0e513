"""Correct edits of training-like graphs, one function each; each keeps every value."""

import operator

from edit_graphs import NUM_RANKS, GraphBuilder, aten, c10d

WAIT = c10d.wait_tensor.default
REDUCE = c10d.all_reduce.default
GATHER = c10d.all_gather_into_tensor.default
SCATTER = c10d.reduce_scatter_tensor.default
COALESCED = {
    REDUCE: c10d.all_reduce_coalesced.default,
    GATHER: c10d.all_gather_into_tensor_coalesced.default,
    SCATTER: c10d.reduce_scatter_tensor_coalesced.default,
}


def starts_of(graph, target=None):
    wanted = COALESCED if target is None else (target,)
    return [node for node in graph.nodes if node.target in wanted]


def wait_of(start):
    return next(user for user in start.users if user.target is WAIT)


def put_in_order(graph):
    """Move nodes behind what they need; whatever can stay, stays."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    missing = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [node for node in graph.nodes if not missing[node]]
    last = None
    while ready:
        ready.sort(key=place.__getitem__)
        node = ready.pop(0)
        if last is not None:
            last.append(node)
        last = node
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)


def _bucket_members(graph, random):
    """Collectives of one kind that do not depend on each other."""
    target = random.choice(sorted({n.target for n in starts_of(graph)}, key=str))
    starts = [n for n in starts_of(graph, target) if n.args[1:] == _usual(target)]
    members, behind = [], set()
    for start in starts:
        if start not in behind and len(start.all_input_nodes) == 1:
            members.append(start)
            behind |= _descendants(start)
    return members


def _usual(target):
    return {
        REDUCE: ("sum", "0"),
        GATHER: (NUM_RANKS, "0"),
        SCATTER: ("sum", NUM_RANKS, "0"),
    }[target]


def _descendants(node):
    found, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                waiting.append(user)
    return found


def bucket(graph, random):
    """Join collectives to one; reductions plain or by rank."""
    members = _bucket_members(graph, random)
    if len(members) < 2:
        return False
    target, builder = members[0].target, GraphBuilder(graph)
    rows = NUM_RANKS if target is SCATTER or random.random() < 0.5 else 1
    rows = 1 if target is GATHER else rows
    if any(m.args[0].meta["val"].numel() % rows for m in members):
        rows = 1
    waits = [wait_of(member) for member in members]
    with graph.inserting_before(members[-1]):
        b = builder.call
        parts = [b(aten.reshape.default, m.args[0], [rows, -1]) for m in members]
        joined = b(aten.reshape.default, b(aten.cat.default, parts, 1), [-1])
        done = builder.waited(target, joined, *members[0].args[1:])
        rows_out = {REDUCE: rows, GATHER: NUM_RANKS, SCATTER: 1}[target]
        table = b(aten.view.default, done, [rows_out, -1])
        sizes = [wait.meta["val"].numel() // rows_out for wait in waits]
        pieces = builder.items(b(aten.split_with_sizes.default, table, sizes, 1))
        results = [
            b(aten.reshape.default, piece, list(wait.meta["val"].shape))
            for piece, wait in zip(pieces, waits, strict=True)
        ]
    _replace(graph, members, waits, results)
    return True


def coalesce(graph, random):
    """One operator on a list of tensors in place of several."""
    members = _bucket_members(graph, random)
    if len(members) < 2:
        return False
    waits, target = [wait_of(member) for member in members], members[0].target
    with graph.inserting_before(members[-1]):
        start = graph.call_function(
            COALESCED[target], ([m.args[0] for m in members], *members[0].args[1:])
        )
        start.meta["val"] = [wait.meta["val"] for wait in waits]
        items = GraphBuilder(graph).items(start)
        results = [graph.call_function(WAIT, (item,)) for item in items]
        for result, wait in zip(results, waits, strict=True):
            result.meta["val"] = wait.meta["val"]
    _replace(graph, members, waits, results)
    return True


def _replace(graph, members, waits, results):
    for wait, result in zip(waits, results, strict=True):
        wait.replace_all_uses_with(result)
        graph.erase_node(wait)
    for member in members:
        graph.erase_node(member)
    put_in_order(graph)


def sink_waits(graph, random):
    """Wait directly before the first reader."""
    for wait in [node for node in graph.nodes if node.target is WAIT]:
        if wait.users:
            min(wait.users).prepend(wait)
    return True


def hoist_starts(graph, random):
    """Start directly behind the last input, without overtaking another start."""
    previous = None
    for start in starts_of(graph):
        places = [
            source for source in start.all_input_nodes if source.op != "placeholder"
        ]
        places += [graph.find_nodes(op="placeholder")[-1]]
        places += [previous] if previous is not None else []
        max(places).append(start)
        previous = start
    return True


def split_lists(graph, random):
    """Two list operators in place of one."""
    changed = False
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "")
        if not name.startswith("_foreach_"):
            continue
        count = len(node.args[0])
        if count < 2:
            continue
        first = set(random.sample(range(count), random.randint(1, count - 1)))
        sides = [
            [i for i in range(count) if (i in first) is side] for side in (True, False)
        ]
        with graph.inserting_before(node):
            for side in sides:
                _copy_items(graph, node, side)
        for user in [user for user in node.users if not user.users]:
            graph.erase_node(user)
        graph.erase_node(node)
        changed = True
    put_in_order(graph)
    return changed


def _copy_items(graph, node, places):
    def take(each):
        return [each[i] for i in places] if isinstance(each, (list, tuple)) else each

    made = graph.call_function(node.target, tuple(map(take, node.args)), node.kwargs)
    made.meta["val"] = take(node.meta["val"])
    for new, old in enumerate(places):
        item = next((user for user in node.users if user.args[1] == old), None)
        if item is not None:
            fresh = graph.call_function(operator.getitem, (made, new))
            fresh.meta["val"] = item.meta["val"]
            item.replace_all_uses_with(fresh)


def dedupe(graph, random):
    """The same collective of the same value once."""
    seen = {}
    changed = False
    for start in starts_of(graph):
        key = (start.target, start.args)
        first = seen.setdefault(key, start)
        if first is not start:
            wait = wait_of(start)
            wait.replace_all_uses_with(wait_of(first))
            graph.erase_node(wait)
            graph.erase_node(start)
            changed = True
    return changed


def remove_dead(graph, random):
    return graph.eliminate_dead_code()


def write_in_place(graph, random):
    """New parameters and momenta written into the inputs, by the last list operators."""
    holders = graph.find_nodes(op="placeholder")
    output = graph.output_node()
    values = list(output.args[0])
    for node in reversed(list(graph.nodes)):
        form = _FORMS.get(node.target)
        items = {user.args[1]: user for user in node.users} if form else {}
        places = {k: values.index(n) for k, n in items.items() if n in values}
        if not places or len(places) < len(node.args[0]):
            continue
        if any(node.args[0][k] is not holders[place] for k, place in places.items()):
            continue
        with graph.inserting_before(node):
            graph.call_function(form, node.args, node.kwargs)
        for k, item in items.items():
            item.replace_all_uses_with(node.args[0][k])
            graph.erase_node(item)
        graph.erase_node(node)
    return True


_FORMS = {
    aten._foreach_add.List: aten._foreach_add_.List,
    aten._foreach_sub.List: aten._foreach_sub_.List,
    aten._foreach_mul.Scalar: aten._foreach_mul_.Scalar,
}
EDITS = (bucket, coalesce, sink_waits, hoist_starts, split_lists, dedupe, remove_dead)


def edit_at_random(graph, random):
    """One to three correct edits."""
    return [edit.__name__ for edit in random.sample(EDITS, 3) if edit(graph, random)]
