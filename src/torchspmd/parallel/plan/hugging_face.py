"""The ``tp_plan`` that Hugging Face transformers models carry, in our styles.

Only the plain dict from patterns to names is read, so transformers need not be there.
"""

import difflib
import inspect
import warnings
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from torchspmd.errors import PlanError, PlanWarning
from torchspmd.parallel.experts import ExpertParallel, ReplicateParallel
from torchspmd.parallel.linear import ColwiseParallel, RowwiseParallel
from torchspmd.parallel.plan.names import match, module_tree
from torchspmd.parallel.plan.plan import Style
from torchspmd.parallel.sequence import SequenceParallel

# Names of transformers' styles for which there is the same one here.
_WHOLE = Replicate()
STYLES: dict[str, Style] = {
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=_WHOLE),
    "colwise_rep": ColwiseParallel(output_layouts=_WHOLE),
    "rowwise": RowwiseParallel(),
    "rowwise_split_input": RowwiseParallel(input_layouts=_WHOLE),
    "rowwise_rep": RowwiseParallel(input_layouts=_WHOLE),
    "embedding_rowwise": RowwiseParallel(input_layouts=_WHOLE),
    "embedding_colwise": ColwiseParallel(output_layouts=_WHOLE),
    "sequence_parallel": SequenceParallel(use_local_output=True),
    # A norm over each head of a sharded projection: replicated, its gradients summed.
    # Which dimension holds the heads does not matter to it, as long as it is not last.
    "replicated_with_grad_allreduce": SequenceParallel(
        sequence_dim=-2, use_local_output=True
    ),
}
# Names that leave a module as it is.
_NO_STYLE = ("replicate",)
_PACKED, _EXPERTS = "packed_colwise", "moe_tp_experts"
# Where a matrix of each expert, (experts, output, input), is cut.
_EXPERT_CUTS = {"colwise": Shard(1), _PACKED: Shard(1), "rowwise": Shard(2)}
_GATE_AND_UP = 2


def read_tp_plan(model: nn.Module, leave: Collection[str]) -> dict[str, Style]:
    """Styles by pattern; an error names all entries without a style that are not left."""
    tree = module_tree(model)
    entries = _entries(model, tree)
    left = _left(model, entries, leave)
    entries = {p: name for p, name in entries.items() if p not in left}
    entries = _without_absent(model, entries, tree)
    styles = _experts(entries, tree)
    unknown = []
    for pattern, name in entries.items():
        if any(pattern == p or pattern.startswith(f"{p}.") for p in styles):
            continue
        paths = match(tree, pattern)
        adapted = _adapted(pattern, name, [tree[path] for path in paths])
        if adapted is None:
            unknown.append(f"{pattern!r}: {_reason(name, bool(paths))}")
        else:
            styles |= adapted
    if unknown:
        lines = "\n".join(f"  * {line}" for line in unknown)
        raise PlanError(
            f"Plan.from_transformers: {type(model).__name__} has entries in its tp_plan "
            f"that have no counterpart here\n\n{lines}\n\nName them in leave= to keep "
            "these modules whole on every rank, and add styles of your own to the plan."
        )
    return styles


def _without_absent(
    model: nn.Module, entries: Mapping[str, str], tree: Mapping[str, nn.Module]
) -> dict[str, str]:
    """The entries that fit this model: a family's plan names what some members lack."""
    parameters = dict(model.named_parameters())
    absent = [p for p in entries if not match(tree, p) and not match(parameters, p)]
    if absent and len(absent) < len(entries):
        names = ", ".join(map(repr, absent))
        warnings.warn(
            f"Plan.from_transformers: the tp_plan of {type(model).__name__} names {names}, "
            "which the model does not have, neither as a module nor as a parameter; "
            "nothing was laid out for them.",
            PlanWarning,
            stacklevel=4,
        )
        return {p: name for p, name in entries.items() if p not in absent}
    return dict(entries)


def packed_experts(model: nn.Module) -> dict[str, Style]:
    """A style by path for each module of packed experts that the model's plan names."""
    if not getattr(model, "tp_plan", None):
        return {}
    tree = module_tree(model)
    found = _experts(_entries(model, tree), tree)
    return {path: style for p, style in found.items() for path in match(tree, p)}


def _experts(
    entries: Mapping[str, str], tree: Mapping[str, nn.Module]
) -> dict[str, Style]:
    """Styles for packed experts, whose parameters have entries of their own."""
    styles: dict[str, Style] = {}
    for pattern in [p for p, name in entries.items() if name == _EXPERTS]:
        modules = [tree[path] for path in match(tree, pattern)]
        kinds = {
            p.removeprefix(f"{pattern}."): name
            for p, name in entries.items()
            if p.startswith(f"{pattern}.") and name in _EXPERT_CUTS
        }
        names = {name for module in modules for name, _ in module.named_parameters()}
        if not modules or names != kinds.keys():
            continue
        arguments = list(inspect.signature(type(modules[0]).forward).parameters)[1:]
        # The experts that a token goes to are integers, without a gradient.
        given = tuple(None if "ind" in name else _WHOLE for name in arguments)
        styles[pattern] = ExpertParallel(
            parameter_placements={n: _EXPERT_CUTS[kind] for n, kind in kinds.items()},
            packed={n: _GATE_AND_UP for n, kind in kinds.items() if kind == _PACKED},
            input_layouts=given,
        )
    return styles


def _adapted(
    pattern: str, name: str, modules: list[nn.Module]
) -> dict[str, Style] | None:
    """The styles of an entry, also for layers with a LoRA adapter; None where unknown."""
    style = STYLES.get(name)
    if style is None or not modules:
        return None
    is_wrapped = ["base_layer" in dict(module.named_children()) for module in modules]
    if not any(is_wrapped):
        return {pattern: style}
    parts = {f"{pattern}.{part}" for part in ("base_layer", "lora_A.*", "lora_B.*")}
    children = {name for module in modules for name, _ in module.named_children()}
    if not all(is_wrapped) or not {"lora_A", "lora_B"} <= children:
        return None
    base, first, second = sorted(parts)
    if isinstance(style, ColwiseParallel) and "embedding" not in name:
        return {base: style, first: ReplicateParallel(), second: style}
    if isinstance(style, RowwiseParallel) and "embedding" not in name:
        return {base: style, first: style, second: ReplicateParallel()}
    return None


def _reason(name: str, is_found: bool) -> str:
    if name not in STYLES:
        return f"{name!r} is no style here"
    if is_found:
        return f"{name!r} for a module around another layer, for which no rule is known"
    return f"{name!r} for a name that no module has, a parameter perhaps"


def _entries(model: nn.Module, tree: Mapping[str, nn.Module]) -> dict[str, str]:
    """The model's own plan, for the names that its modules have inside of ``model``."""
    found = getattr(model, "tp_plan", None)
    entries = dict(found) if isinstance(found, Mapping) else {}
    if not entries:
        raise PlanError(
            f"Plan.from_transformers: {type(model).__name__} carries no tp_plan. Write a "
            "Plan by hand, or try auto_plan(model)."
        )
    prefix = _prefix(entries, tree)
    return {
        f"{prefix}{p}": name for p, name in entries.items() if name not in _NO_STYLE
    }


def _prefix(entries: Mapping[str, str], tree: Mapping[str, nn.Module]) -> str:
    """Where the model of the plan is: a wrapper, as PEFT's, puts names before its own."""
    if any(match(tree, pattern) for pattern in entries):
        return ""
    for path in tree:
        if path and any(match(tree, f"{path}.{pattern}") for pattern in entries):
            return f"{path}."
    return ""


def _left(
    model: nn.Module, entries: Mapping[str, str], leave: Collection[str]
) -> set[str]:
    unused = [p for p in leave if not any(fnmatchcase(e, p) for e in entries)]
    if unused:
        near = [difflib.get_close_matches(p, entries, n=1, cutoff=0.3) for p in unused]
        hints = [
            f"{p!r} (nearest: {n[0]!r})" if n else f"{p!r}"
            for p, n in zip(unused, near, strict=True)
        ]
        raise PlanError(
            f"Plan.from_transformers: leave= names {', '.join(hints)}, which no entry of "
            f"the tp_plan of {type(model).__name__} matches."
        )
    return {e for e in entries if any(fnmatchcase(e, p) for p in leave)}
