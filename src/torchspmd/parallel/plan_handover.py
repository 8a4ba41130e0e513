"""Neighbours whose layouts do not hand over, where the module tree shows it for certain.

The forward of each module around a styled one is traced with its children closed. What
cannot be traced (control flow, shapes in the code) is not judged here: a wrong shape is
then an error at the first call. What can be traced is judged only where it is certain.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from torchspmd import _torch
from torchspmd.parallel.colwise import ColwiseParallel
from torchspmd.parallel.experts import ExpertParallel, ReplicateParallel
from torchspmd.parallel.fused import FusedColwiseParallel, KeyValueParallel
from torchspmd.parallel.plan_assignment import Assignment, own_twin
from torchspmd.parallel.plan_graph import Reach, follow_outputs
from torchspmd.parallel.prepare import PrepareModuleInput
from torchspmd.parallel.sequence import SequenceParallel
from torchspmd.parallel.sharded import ShardedStyle
from torchspmd.parallel.style import ParallelStyle
from torchspmd.parallel.text_form import describe_placement, describe_style


class _End(NamedTuple):
    """One module of a hand-over: what it is, and the layout that it gives or takes."""

    path: str
    module: nn.Module
    style: ParallelStyle | None
    layout: Placement


def find_bad_handovers(
    tree: Mapping[str, nn.Module], assignments: Sequence[Assignment]
) -> list[str]:
    """Pairs of modules of which one certainly gives what the other cannot take."""
    styles = {id(a.module): own_twin(a.style) for a in assignments}
    parents = dict.fromkeys(a.path.rpartition(".")[0] for a in assignments if a.path)
    problems: list[str] = []
    for parent in parents:
        for reach in follow_outputs(tree[parent]):
            problems += _judge(reach, parent, tree, styles)
    return list(dict.fromkeys(problems))


def _judge(
    reach: Reach,
    parent: str,
    tree: Mapping[str, nn.Module],
    styles: Mapping[int, ParallelStyle | None],
) -> Iterator[str]:
    path = _join(parent, reach.source)
    giver = _giver(path, tree[path], styles)
    # A hook may hand on something else than the module does.
    if giver is None or _torch.has_forward_hooks(giver.module):
        return
    if reach.split is not None and isinstance(giver.style, ColwiseParallel):
        if giver.layout == Shard(-1):
            yield _split_text(giver, reach.split)
    for target in reach.targets:
        taker = _taker(_join(parent, target), tree, styles, giver)
        if taker is None or _torch.has_forward_hooks(taker.module):
            continue
        if _certainly_differ(giver.layout, taker.layout):
            yield _text(giver, taker)


def _giver(
    path: str, module: nn.Module, styles: Mapping[int, ParallelStyle | None]
) -> _End | None:
    """What a module hands on, as a plain tensor; None where that is not certain."""
    if id(module) not in styles:
        is_whole = type(module) is nn.Linear
        return _End(path, module, None, Replicate()) if is_whole else None
    style = styles[id(module)]
    if isinstance(style, (FusedColwiseParallel, KeyValueParallel)):
        return _End(path, module, style, Shard(-1))
    if isinstance(style, (ShardedStyle, ExpertParallel)) and style.use_local_output:
        assert isinstance(style.output_layouts, tuple)
        return _End(path, module, style, style.output_layouts[0])
    if isinstance(style, ReplicateParallel) and style.use_local_output:
        return _End(path, module, style, Replicate())
    if isinstance(style, SequenceParallel) and style.use_local_output:
        return _End(path, module, style, style.sequence_sharding[0])
    return None  # a DTensor, which knows its layout itself, or a style of the user's


def _taker(
    path: str,
    tree: Mapping[str, nn.Module],
    styles: Mapping[int, ParallelStyle | None],
    giver: _End,
) -> _End | None:
    """What a module takes a plain tensor as; None where that is not certain."""
    module = tree[path]
    if id(module) not in styles:
        return _plain_taker(path, module, giver)
    style = styles[id(module)]
    layout = _taken(style)
    if layout is None:
        return None
    if giver.style is None:
        # A Linear without a style is whole in its features; its tokens may not be. It
        # may also have been built with the features of one rank.
        fits = isinstance(module, nn.Linear) and _features(giver) == module.in_features
        if layout != Shard(-1) or not fits:
            return None
    return _End(path, module, style, layout)


def _taken(style: ParallelStyle | None) -> Placement | None:
    """The layout that a style takes a first input as, if that is a plain tensor."""
    if isinstance(style, SequenceParallel):
        return style.sequence_sharding[0]
    if isinstance(style, ReplicateParallel):
        return Replicate()
    known = (
        ShardedStyle,
        FusedColwiseParallel,
        KeyValueParallel,
        ExpertParallel,
        PrepareModuleInput,
    )
    if isinstance(style, known) and isinstance(style.input_layouts, tuple):
        return style.input_layouts[0]
    return None


def _plain_taker(path: str, module: nn.Module, giver: _End) -> _End | None:
    """A layer without a style needs its input whole, or its gradients are one rank's."""
    trained = any(p.requires_grad for p in module.parameters(recurse=False))
    if giver.style is None or isinstance(giver.layout, Replicate) or not trained:
        return None
    # A layer that was built with the features of one rank is right as it is.
    if giver.layout == Shard(-1) and _features(giver) != _read_features(module):
        return None
    return _End(path, module, None, Replicate())


def _features(giver: _End) -> int | None:
    module = giver.module
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.embedding_dim if isinstance(module, nn.Embedding) else None


def _read_features(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return module.in_features
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return module.normalized_shape[-1]
    return None


def _certainly_differ(first: Placement, second: Placement) -> bool:
    if isinstance(first, Shard) and isinstance(second, Shard):
        # From the front and from the back may mean one dimension.
        return first.dim != second.dim and (first.dim < 0) == (second.dim < 0)
    return type(first) is not type(second)


def _text(giver: _End, taker: _End) -> str:
    gives, takes = map(describe_placement, (giver.layout, taker.layout))
    if giver.style is None:
        return (
            f"'{taker.path}' ({describe_style(taker.style)}) takes {takes}, but "
            f"'{giver.path}' before it has no style and hands on all its features; give "
            f"'{giver.path}' ColwiseParallel(), or '{taker.path}' "
            "input_layouts=Replicate()"
        )
    source = f"'{giver.path}' ({describe_style(giver.style)}) hands on {gives}"
    fix = f"give {', or '.join(_fixes(giver, taker))}"
    if taker.style is not None:
        taking = f"'{taker.path}' ({describe_style(taker.style)}) takes {takes}"
        return f"{source}, but {taking}; {fix}"
    return (
        f"{source}, but '{taker.path}' has no style and needs the whole tensor, or its "
        f"parameters get the gradients of one rank's part; {fix}"
    )


def _split_text(giver: _End, function: str) -> str:
    return (
        f"'{giver.path}' ({describe_style(giver.style)}) hands on a shard of its "
        f"features, which {function} then takes apart: a rank's parts would not be its "
        f"share of each part; give '{giver.path}' FusedColwiseParallel(parts=...)"
    )


def _fixes(giver: _End, taker: _End) -> list[str]:
    """The arguments that would make the two agree, where their styles have them."""
    gives, takes = map(describe_placement, (giver.layout, taker.layout))
    fixes = []
    if giver.layout == Shard(-1) and isinstance(taker.module, nn.Linear):
        fixes.append(f"'{taker.path}' RowwiseParallel()")
    elif _has_argument(taker.style, "input_layouts"):
        fixes.append(f"'{taker.path}' input_layouts={gives}")
    if _has_argument(giver.style, "output_layouts"):
        fixes.append(f"'{giver.path}' output_layouts={takes}")
    return fixes or [f"'{taker.path}' a style that takes {gives}"]


def _has_argument(style: ParallelStyle | None, name: str) -> bool:
    return dataclasses.is_dataclass(style) and any(
        field.name == name for field in dataclasses.fields(style)
    )


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
