"""What an edited graph must keep, read from its nodes without their values.

Definitions, inputs and outputs, waits, random ops, and the order of collectives.
"""

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import (
    communication_of,
    find_writes,
    is_view,
    is_wait,
    operator_of,
)
from torchspmd.step.graph.metadata import (
    output_values,
    readable_name,
    roles_of,
)
from torchspmd.step.legality.edit import Edit, Problem, output_name, show
from torchspmd.step.legality.values import read_call

# ----------------------------------------------------------------------------
# Each value is computed before it is used; inputs and outputs are the same.

_DEFINED = "Insert a node behind the nodes that it takes."
_INPUTS = (
    "A pass keeps the placeholders, all and in their order: the caller gives them."
)
_OUTPUTS = "A pass keeps the outputs, all and in their order: the caller unpacks them."
_ROLES = "Keep the meta of the output node; it says which output is whose next value."


def check_definitions(graph: fx.Graph) -> list[Problem]:
    """Each node takes only nodes of this graph that come before it."""
    problems = []
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                why = "comes later" if source.graph is graph else "is not in the graph"
                text = (
                    f"{readable_name(node)} uses {readable_name(source)}, which {why}"
                )
                problems.append(Problem("definition", text, _DEFINED))
        seen.add(node)
    if not problems:
        try:
            graph.lint()
        except (RuntimeError, ValueError) as error:
            problems.append(Problem("definition", str(error).rstrip("."), _DEFINED))
    return problems


def check_interface(edit: Edit) -> list[Problem]:
    """The graphs have the same inputs, outputs, and roles of outputs."""
    return [*_check_inputs(edit), *_check_outputs(edit)]


def _check_inputs(edit: Edit) -> Iterator[Problem]:
    old, new = (
        graph.find_nodes(op="placeholder") for graph in (edit.before, edit.after)
    )
    for place, (was, now) in enumerate(zip(old, new, strict=False)):
        if was.target != now.target:
            names = readable_name(was), readable_name(now)
            text = f"input {place} was {names[0]} and is {names[1]}"
            if names[0] == names[1]:  # only what its node is called by is another
                text = f"input {place} ({names[0]}) had the target {was.target!r}"
                text += f" and has {now.target!r}"
            yield Problem("input", text, _INPUTS)
            return  # all that follow are moved
    if len(old) != len(new):
        more, what = (old, "is gone") if len(old) > len(new) else (new, "is new")
        one = more[min(len(old), len(new))]
        yield Problem("input", f"the input {readable_name(one)} {what}", _INPUTS)


def _check_outputs(edit: Edit) -> Iterator[Problem]:
    old, new = output_values(edit.before), output_values(edit.after)
    if len(old) != len(new):
        dropped = _dropped(edit, old, new)
        what = f"; {dropped} is missing" if dropped and len(new) < len(old) else ""
        text = f"the graph had {len(old)} outputs and has {len(new)}{what}"
        yield Problem("output", text, _OUTPUTS)
        return
    for place, (was, now) in enumerate(zip(old, new, strict=True)):
        if isinstance(was, fx.Node) != isinstance(now, fx.Node):
            name = output_name(edit.before, place)
            text = f"{name} was {show(was)} and is {show(now)}"
            yield Problem("output", text, _OUTPUTS)
    if roles_of(edit.before) != roles_of(edit.after):
        yield Problem("output", "the roles of the outputs changed", _ROLES)


def _dropped(edit: Edit, old: list[object], new: list[object]) -> str:
    """The first output whose node is not where it should be."""
    for place, was in enumerate(old):
        now = new[place] if place < len(new) else None
        expected = edit.new.get(was) if isinstance(was, fx.Node) else was
        if now is not expected or now is None:
            return output_name(edit.before, place)
    return ""


# ----------------------------------------------------------------------------
# One wait for each collective, before anything else uses its result.

_ASYNCHRONOUS = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_ONE = "Each collective has one wait for each tensor that it gives."
_BEHIND = "Use the result of the wait."


@dataclass(slots=True)
class Started:
    """A collective, what waits for it, and what uses it without a wait.

    Attributes:
        start: The node that starts it.
        items: The waits for each of its tensors, by the tensor's number.
        early: Nodes that use a tensor without a wait.
    """

    start: fx.Node
    items: dict[object, list[fx.Node]] = field(default_factory=dict)
    early: list[fx.Node] = field(default_factory=list)

    @property
    def waits(self) -> list[fx.Node]:
        """All waits."""
        return [wait for waits in self.items.values() for wait in waits]


def find_starts(graph: fx.Graph) -> list[Started]:
    """The collectives of a graph that must be waited for, in order, with their waits."""
    return [_follow(node) for node in graph.nodes if _is_start(node)]


def _is_start(node: fx.Node) -> bool:
    target = operator_of(node)
    is_asynchronous = target is not None and target.namespace in _ASYNCHRONOUS
    return is_asynchronous and communication_of(node) is not None


def _follow(start: fx.Node) -> Started:
    found = Started(start)
    waiting: list[tuple[fx.Node, object]] = [(start, None)]
    # What an in-place collective writes into must not be used before the wait either.
    waiting += [(write.node, write.item) for write in find_writes(start)]
    while waiting:
        node, item = waiting.pop()
        for user in node.users:
            if node is not start and not start < user:
                continue  # uses of a buffer before the collective writes into it
            if is_wait(user):
                found.items.setdefault(item, []).append(user)
            elif user.target is operator.getitem:
                waiting.append((user, user.args[1]))
            elif is_view(user):
                waiting.append((user, item))
            elif user is not start:
                found.early.append(user)
    return found


def check_waits(edit: Edit) -> list[Problem]:
    """Every wait of the edited graph is right, as far as it was right before."""
    before = {started.start: started for started in find_starts(edit.before)}
    problems: list[Problem] = []
    waited: set[fx.Node] = set()
    for started in find_starts(edit.after):
        waited |= set(started.waits)
        old = edit.old.get(started.start)
        problems += _check(started, before.get(old) if old else None)
    problems += _check_strays(edit, waited)
    return problems


def _check(started: Started, old: Started | None) -> Iterator[Problem]:
    name = readable_name(started.start)
    if not started.items and (old is None or old.items):
        user = started.early[0] if started.early else None
        use = f", and {readable_name(user)} uses it" if user is not None else ""
        yield Problem("wait", f"nothing waits for {name}{use}", _ONE)
    most = max((len(waits) for waits in old.items.values()), default=1) if old else 1
    for waits in started.items.values():
        if len(waits) > most:
            names = " and ".join(readable_name(each) for each in waits)
            yield Problem("wait", f"{names} both wait for {name}", _ONE)
    if old is None or not old.early:
        for user in started.early if started.items else ():
            text = f"{readable_name(user)} uses {name} without its wait"
            yield Problem("wait", text, _BEHIND)


def _check_strays(edit: Edit, waited: set[fx.Node]) -> Iterator[Problem]:
    """Waits for something that no collective gave."""
    for node in edit.after.nodes:
        if not is_wait(node) or node in waited:
            continue
        old, (source, *_) = edit.old.get(node), node.all_input_nodes
        old_source = edit.old.get(source)
        if old is not None and old_source in old.all_input_nodes:
            continue  # so it was before
        text = (
            f"{readable_name(node)} waits for {readable_name(source)}, which no "
            "collective started, or which was waited for already"
        )
        yield Problem("wait", text, _ONE)


# ----------------------------------------------------------------------------
# Random ops keep their order.

_RANDOM = "Nodes that take random numbers keep their order, and none is added or lost."


def random_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that take random numbers, in order."""
    return [
        node
        for node in graph.nodes
        if (target := operator_of(node)) is not None
        and _torch.signature_of(target).is_random
    ]


def check_random_order(edit: Edit) -> Iterator[Problem]:
    """Random ops are the same ones, in their order."""
    old, new = random_nodes(edit.before), random_nodes(edit.after)
    for was, now in zip(old, new, strict=False):
        if edit.old.get(now) is not was:
            text = (
                f"{readable_name(now)} takes the random numbers that "
                f"{readable_name(was)} took"
            )
            yield Problem("random", text, _RANDOM)
            return  # the rest follows from it
    if len(old) != len(new):
        one = (old if len(old) > len(new) else new)[min(len(old), len(new))]
        what = "no longer takes" if len(old) > len(new) else "now takes"
        text = f"{readable_name(one)} {what} random numbers"
        yield Problem("random", text, _RANDOM)


# ----------------------------------------------------------------------------
# Calls of other things than torch's operators, whose names say that they write in place or
# take random numbers.
#
# Values are compared by operators. A method, a Python function or a module in a graph is
# taken for one that only computes; these are not.

_WRITES = "Take the operator of torch.ops.aten, whose writes are checked."
_DRAWS = "Leave it out: the random numbers of the step would change."
_IN_PLACE = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv),
    *(operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul),
    *(operator.iand, operator.ior, operator.ixor, operator.setitem),
)
_RANDOM_FUNCTIONS = frozenset(
    {"bernoulli", "manual_seed", "multinomial", "normal", "poisson", "seed"}
)


def check_unknown_calls(edit: Edit) -> Iterator[Problem]:
    """What an edit adds; what was there before is the step's own."""
    for node in edit.after.nodes:
        if node in edit.old or operator_of(node) is not None:
            continue
        if _writes(node):
            text = f"{readable_name(node)} is new and writes in place ({_name(node)})"
            yield Problem("state", text, _WRITES)
        elif _is_random(node):
            text = (
                f"{readable_name(node)} is new and takes random numbers ({_name(node)})"
            )
            yield Problem("random", text, _DRAWS)


def _writes(node: fx.Node) -> bool:
    if node.op == "call_function" and node.target in _IN_PLACE:
        return True
    if node.op == "call_module":
        return getattr(_module(node), "inplace", False) is True
    name = _name(node)
    is_marked = name.endswith("_") and not name.endswith("__")
    if node.op == "call_function":  # a function of the user's may be called anything
        return is_marked and _is_torch(node)
    return node.op == "call_method" and (is_marked or name == "__setitem__")


def _is_random(node: fx.Node) -> bool:
    is_function = node.op == "call_function" and _is_torch(node)
    name = _name(node)
    return (is_function or node.op == "call_method") and (
        name in _RANDOM_FUNCTIONS or name.startswith("rand")
    )


def _is_torch(node: fx.Node) -> bool:
    module = getattr(node.target, "__module__", None) or ""  # none, if it is built in
    is_built_in = getattr(torch, _name(node), None) is node.target
    return is_built_in or module.partition(".")[0] == "torch"


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _module(node: fx.Node) -> object:
    owner = node.graph.owning_module
    if owner is None:
        return None
    try:
        return owner.get_submodule(str(node.target))
    except AttributeError:
        return None


# ----------------------------------------------------------------------------
# Collectives keep their order on each group, or the pass says that it changes it.
#
# All ranks run the same graph, so a changed order is the same on all of them; but a pass
# that changes it by accident has usually moved more than it meant to, and two programs that
# were split (setup and steady state) would no longer agree. So it is an error unless
# declared, and then the proof names it.

_RULE = (
    "Keep the order of collectives on one group, or declare the pass with "
    "reorders_collectives=True."
)
_GROUPS = ("group_name", "group", "process_group", "ranks", "tag")


def check_order(
    edit: Edit,
    before: Mapping[fx.Node, int],
    after: Mapping[fx.Node, int],
    may_reorder: bool | Collection[str],
) -> tuple[list[Problem], list[str]]:
    """Compare the order of collectives on each group.

    Args:
        edit: The edit.
        before: The value of each node before; collectives that a pass made anew are
            known again by their values.
        after: The same for the edited graph.
        may_reorder: Whether the order may change, or on which groups.

    Returns:
        Changes that were not declared, and a line for each that was.
    """
    problems: list[Problem] = []
    declared: list[str] = []
    old, new = _by_group(edit.before, before), _by_group(edit.after, after)
    for group, nodes in new.items():
        places = _places_before(edit, old.get(group, {}), nodes)
        for (one, a), (two, b) in pairwise(places.items()):
            if a <= b:
                continue
            names = f"{readable_name(one)} now starts before {readable_name(two)}"
            if may_reorder is True or (may_reorder and group in may_reorder):
                declared.append(f"{names} on group {group!r}")
            else:
                text = f"{names} on group {group!r}; it started after it"
                problems.append(Problem("order", text, _RULE))
    return problems, declared


def _by_group(
    graph: fx.Graph, values: Mapping[fx.Node, int]
) -> dict[str, dict[fx.Node, int]]:
    """The collectives on each group, in order, and their values."""
    groups: dict[str, dict[fx.Node, int]] = {}
    for node in graph.nodes:
        if communication_of(node) is not None:
            groups.setdefault(_group_of(node), {})[node] = values[node]
    return groups


def _group_of(node: fx.Node) -> str:
    arguments = read_call(node).arguments
    named = [arguments[name] for name in _GROUPS if arguments.get(name) is not None]
    return str(named[0]) if named else ""


def _places_before(
    edit: Edit, old: Mapping[fx.Node, int], new: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """Where the collectives of the edited graph were before, of those that were."""
    kept = {edit.old[node] for node in new if node in edit.old}
    gone: dict[int, list[fx.Node]] = {}
    for was, value in reversed(list(old.items())):
        if was not in kept:
            gone.setdefault(value, []).append(was)
    places: dict[fx.Node, int] = {}
    for node, value in new.items():
        if node in edit.old:
            places[node] = edit.place_before[edit.old[node]]
        elif gone.get(value):
            places[node] = edit.place_before[gone[value].pop()]
    return places
