"""The ``tp_plan`` that Hugging Face transformers models carry, in our styles.

Only the plain dict from patterns to names is read, so transformers need not be there.
"""

import difflib
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import Replicate

from torchspmd.errors import PlanError
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


def read_tp_plan(model: nn.Module, leave: Collection[str]) -> dict[str, Style]:
    """Styles by pattern; every entry has one or is left, or all that are not are named."""
    entries = _entries(model)
    left = _left(model, entries, leave)
    tree = module_tree(model)
    unknown = [
        f"{pattern!r}: {_reason(name)}"
        for pattern, name in entries.items()
        if pattern not in left and not (name in STYLES and match(tree, pattern))
    ]
    if unknown:
        lines = "\n".join(f"  * {line}" for line in unknown)
        raise PlanError(
            f"Plan.from_transformers: {type(model).__name__} has entries in its tp_plan "
            f"that have no counterpart here\n\n{lines}\n\nName them in leave= to keep "
            "these modules whole on every rank, and add styles of your own to the plan."
        )
    return {p: STYLES[name] for p, name in entries.items() if p not in left}


def _reason(name: str) -> str:
    if name in STYLES:
        return f"{name!r} for a parameter that no module of its own holds"
    return f"{name!r} is no style here"


def _entries(model: nn.Module) -> dict[str, str]:
    found = getattr(model, "tp_plan", None)
    entries = dict(found) if isinstance(found, Mapping) else {}
    if not entries:
        raise PlanError(
            f"Plan.from_transformers: {type(model).__name__} carries no tp_plan. Write a "
            "Plan by hand, or try auto_plan(model)."
        )
    return {p: name for p, name in entries.items() if name not in _NO_STYLE}


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
