"""Neighbours whose layouts do not match, where the module tree shows it for certain.

The forward of each module around a styled one is traced with its children as single
nodes. What cannot be traced (control flow, shapes in the code) is not judged here: a wrong
shape is then an error at the first call.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from torchspmd import _torch
from torchspmd.layout.placements import format_placement
from torchspmd.parallel.linear import ColwiseParallel, linear_form
from torchspmd.parallel.plan.assignment import Assignment, own_style, taken_layouts
from torchspmd.parallel.plan.copies import copy_shapes, reaches_globals, traces_kept
from torchspmd.parallel.plan.flow import SPLITS, is_plain_linear
from torchspmd.parallel.plan.text_form import describe_style
from torchspmd.parallel.style import ParallelStyle

# ----------------------------------------------------------------------------
# One forward as a graph: which module's output goes where.

# What works element by element, so that a tensor keeps its layout through it: functions
# and methods by name, and the modules of torch that are called like them.
_KEEPS_LAYOUT = frozenset(
    "clone contiguous dropout elu exp gelu hardswish identity leaky_relu leakyrelu mish "
    "mul neg relu relu6 sigmoid silu softplus square tanh".split()
)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# The last dimension of what a Linear gets in a transformer: (batch, sequence, features).
_LAST_DIMS = (-1, 2)


@dataclass(frozen=True, slots=True)
class Reach:
    """Where the output of one call of a module goes, element by element.

    Attributes:
        source: Name of the module inside its parent.
        targets: Modules that get it as their first input.
        split: The function that takes its last dimension apart, if one does.
    """

    source: str
    targets: tuple[str, ...]
    split: str | None


def follow_outputs(parent: nn.Module) -> list[Reach]:
    """Where the output of each module inside ``parent`` goes; empty if not traceable.

    Its forward is run: give a copy.
    """
    graph = _trace(parent)
    nodes = [] if graph is None else [n for n in graph.nodes if n.op == "call_module"]
    return [_reach(node, parent) for node in nodes]


class _LeafChildren(fx.Tracer):
    """Traces one forward; every module inside it is one node."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _trace(module: nn.Module) -> fx.Graph | None:
    if isinstance(module, _CONTAINERS) or reaches_globals(module):
        return None
    try:
        with traces_kept():
            return _LeafChildren().trace(module)
    except Exception:  # the user's code on fx proxies can raise anything
        return None


def _reach(node: fx.Node, parent: nn.Module) -> Reach:
    users = list(_users(node, parent))
    targets = [str(u.target) for u, _ in users if u.op == "call_module"]
    splits = (_split_name(user) for user, _ in users)
    return Reach(
        source=str(node.target),
        targets=tuple(dict.fromkeys(targets)),
        split=next((name for name in splits if name is not None), None),
    )


def _users(node: fx.Node, parent: nn.Module) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Nodes that take a node's output as first input, and what they take it from."""
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop()
        for user in current.users:
            if user in seen:
                continue
            if _keeps_layout(user, parent):
                seen.add(user)
                waiting.append(user)
            elif user.args and user.args[0] is current:
                yield user, current


def _keeps_layout(node: fx.Node, parent: nn.Module) -> bool:
    if node.op == "call_method":
        return node.target in _KEEPS_LAYOUT
    if node.op == "call_function":
        return getattr(node.target, "__name__", "") in _KEEPS_LAYOUT
    if node.op != "call_module":
        return False
    kind = type(parent.get_submodule(str(node.target)))
    is_own = kind.__module__.startswith("torch.nn.modules.")
    return is_own and kind.__name__.lower() in _KEEPS_LAYOUT


def _split_name(node: fx.Node) -> str | None:
    if node.op not in ("call_method", "call_function"):
        return None
    target: str | Callable[..., object] = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
    return name if name in SPLITS and dim in _LAST_DIMS else None


# ----------------------------------------------------------------------------
# Whether what a module returns is what the next one takes.


class _Neighbour(NamedTuple):
    """One of two neighbours, and the layout that it returns or takes."""

    path: str
    module: nn.Module
    style: ParallelStyle | None
    layout: Placement


def find_mismatched_neighbours(
    tree: Mapping[str, nn.Module], assignments: Sequence[Assignment]
) -> list[str]:
    """Pairs of modules of which one certainly returns what the next cannot take."""
    styles = {id(a.module): own_style(a.style) for a in assignments}
    parents = dict.fromkeys(a.path.rpartition(".")[0] for a in assignments if a.path)
    problems: list[str] = []
    copied = copy_shapes(tree[""]) if parents else None
    for parent in parents:
        assert copied is not None
        for reach in follow_outputs(copied.get_submodule(parent)):
            problems += _judge(reach, parent, tree, styles)
    return list(dict.fromkeys(problems))


def _judge(
    reach: Reach,
    parent: str,
    tree: Mapping[str, nn.Module],
    styles: Mapping[int, ParallelStyle | None],
) -> Iterator[str]:
    path = _join(parent, reach.source)
    producer = _producer(path, tree[path], styles)
    # A hook may return something else than the module does.
    if producer is None or _torch.has_forward_hooks(producer.module):
        return
    if reach.split is not None and isinstance(producer.style, ColwiseParallel):
        if producer.layout == Shard(-1):
            yield _split_text(producer, reach.split)
    for target in reach.targets:
        consumer = _consumer(_join(parent, target), tree, styles, producer)
        if consumer is None or _torch.has_forward_hooks(consumer.module):
            continue
        if _certainly_differ(producer.layout, consumer.layout):
            yield _text(producer, consumer)


def _producer(
    path: str, module: nn.Module, styles: Mapping[int, ParallelStyle | None]
) -> _Neighbour | None:
    """What a module returns, as a plain tensor; None where that is not certain."""
    if id(module) not in styles:
        is_known = is_plain_linear(module) or _is_trained_leaf(module)
        return _Neighbour(path, module, None, Replicate()) if is_known else None
    style = styles[id(module)]
    layouts = style.layouts(module) if style is not None else None
    if layouts is None or not layouts.local_output:
        return (
            None  # a DTensor, which knows its layout itself, or a style of the user's
        )
    return _Neighbour(path, module, style, layouts.output)


def _consumer(
    path: str,
    tree: Mapping[str, nn.Module],
    styles: Mapping[int, ParallelStyle | None],
    producer: _Neighbour,
) -> _Neighbour | None:
    """What a module takes a plain tensor as; None where that is not certain."""
    module = tree[path]
    if id(module) not in styles:
        return _plain_consumer(path, module, producer)
    style = styles[id(module)]
    layouts, _ = taken_layouts(style, module)
    layout = layouts[0] if layouts else None
    if layout is None:
        return None
    if producer.style is None and not _can_judge_plain(producer, module, layout):
        return None
    return _Neighbour(path, module, style, layout)


def _can_judge_plain(
    producer: _Neighbour, module: nn.Module, layout: Placement
) -> bool:
    """Whether a module before this one, without a style, is certainly wrong there."""
    if layout == Shard(-1):
        # A Linear without a style is whole in its features. It may also have been built
        # with the features of one rank.
        fits = linear_form(module) is not None
        return (
            fits
            and linear_form(producer.module) is not None
            and _features(producer) == _read_features(module)
        )
    # Whatever its input is, the gradient that comes back is that of one rank's part.
    return isinstance(layout, Shard) and _is_trained_leaf(producer.module)


def _is_trained_leaf(module: nn.Module) -> bool:
    """A layer without a hook that reduces its gradients."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    hooks = (_torch.hooks_of(p, _torch.GRADIENT_HOOK_TABLES) for p in parameters)
    is_leaf = next(module.children(), None) is None
    return is_leaf and bool(parameters) and not any(map(list, hooks))


def _plain_consumer(
    path: str, module: nn.Module, producer: _Neighbour
) -> _Neighbour | None:
    """A layer without a style needs its input whole, or its gradients are one rank's."""
    trained = any(p.requires_grad for p in module.parameters(recurse=False))
    if producer.style is None or isinstance(producer.layout, Replicate) or not trained:
        return None
    # A layer that was built with the features of one rank is right as it is.
    if producer.layout == Shard(-1) and _features(producer) != _read_features(module):
        return None
    return _Neighbour(path, module, None, Replicate())


def _features(producer: _Neighbour) -> int | None:
    module = producer.module
    form = linear_form(module)
    if form is not None:
        return form.outside
    return module.embedding_dim if isinstance(module, nn.Embedding) else None


def _read_features(module: nn.Module) -> int | None:
    form = linear_form(module)
    if form is not None:
        return form.inside
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return module.normalized_shape[-1]
    return None


def _certainly_differ(first: Placement, second: Placement) -> bool:
    if isinstance(first, Shard) and isinstance(second, Shard):
        # From the front and from the back may mean one dimension.
        return first.dim != second.dim and (first.dim < 0) == (second.dim < 0)
    return type(first) is not type(second)


def _text(producer: _Neighbour, consumer: _Neighbour) -> str:
    returned, taken = map(format_placement, (producer.layout, consumer.layout))
    if producer.style is None and consumer.layout != Shard(-1):
        return (
            f"'{consumer.path}' ({describe_style(consumer.style)}) takes {taken}, but "
            f"'{producer.path}' before it has no style, so that its parameters get the "
            f"gradients of one rank's part; give '{producer.path}' {_summing(consumer)}, "
            f"or '{consumer.path}' a style that takes Replicate()"
        )
    if producer.style is None:
        return (
            f"'{consumer.path}' ({describe_style(consumer.style)}) takes {taken}, but "
            f"'{producer.path}' before it has no style and returns all its features; give "
            f"'{producer.path}' ColwiseParallel(), or '{consumer.path}' "
            "input_layouts=Replicate()"
        )
    source = f"'{producer.path}' ({describe_style(producer.style)}) returns {returned}"
    fix = f"give {', or '.join(_fixes(producer, consumer))}"
    if consumer.style is not None:
        taking = f"'{consumer.path}' ({describe_style(consumer.style)}) takes {taken}"
        return f"{source}, but {taking}; {fix}"
    return (
        f"{source}, but '{consumer.path}' has no style and needs the whole tensor, or its "
        f"parameters get the gradients of one rank's part; {fix}"
    )


def _summing(consumer: _Neighbour) -> str:
    assert isinstance(consumer.layout, Shard)
    dim = consumer.layout.dim
    return f"SequenceParallel({f'sequence_dim={dim}' if dim != 1 else ''})"


def _split_text(producer: _Neighbour, function: str) -> str:
    return (
        f"'{producer.path}' ({describe_style(producer.style)}) returns a shard of its "
        f"features, which {function} then takes apart: a rank's parts would not be its "
        f"share of each part; give '{producer.path}' FusedColwiseParallel(parts=...)"
    )


def _fixes(producer: _Neighbour, consumer: _Neighbour) -> list[str]:
    """The arguments that would make the two agree, where their styles have them."""
    returned, taken = map(format_placement, (producer.layout, consumer.layout))
    fixes = []
    if producer.layout == Shard(-1) and linear_form(consumer.module) is not None:
        fixes.append(f"'{consumer.path}' RowwiseParallel()")
    elif _has_argument(consumer.style, "input_layouts"):
        fixes.append(f"'{consumer.path}' input_layouts={returned}")
    if _has_argument(producer.style, "output_layouts"):
        fixes.append(f"'{producer.path}' output_layouts={taken}")
    return fixes or [f"'{consumer.path}' a style that takes {returned}"]


def _has_argument(style: ParallelStyle | None, name: str) -> bool:
    return dataclasses.is_dataclass(style) and any(
        field.name == name for field in dataclasses.fields(style)
    )


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
