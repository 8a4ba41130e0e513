"""``auto_plan``: a plan from which Linears feed which, or the reasons why there is none."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from torch import nn
from torch.distributed.tensor import Replicate

from torchspmd.errors import PlanError
from torchspmd.parallel.experts import ReplicateParallel
from torchspmd.parallel.fused import FusedColwiseParallel
from torchspmd.parallel.linear import ColwiseParallel, RowwiseParallel, linear_form
from torchspmd.parallel.plan.flow import OUTPUT, Flow, follow, is_plain_linear
from torchspmd.parallel.plan.forecast import find_fixed_sizes
from torchspmd.parallel.plan.hugging_face import packed_experts
from torchspmd.parallel.plan.names import (
    explain_no_match,
    fold_texts,
    match,
    module_tree,
    shortest_patterns,
)
from torchspmd.parallel.plan.plan import Plan, Style
from torchspmd.parallel.plan.resolve import head_size, resolve
from torchspmd.parallel.plan.run import Inputs, NotRunnableError, guess_inputs
from torchspmd.parallel.sequence import SequenceParallel

# Two different numbers above 1, so that shapes tell the dimensions apart.
_BATCH, _SEQ = 2, 8
_RANKS = (2, 3)  # on which the forward is tried: heads divide over one of them
_COLWISE = ColwiseParallel()
_ROWWISE = RowwiseParallel()
_HEAD = ColwiseParallel(output_layouts=Replicate())
_TABLE = RowwiseParallel(input_layouts=Replicate())


def auto_plan(
    model: nn.Module,
    *,
    example_inputs: Inputs | None = None,
    leave: Collection[str] = (),
) -> Plan:
    """A plan inferred from one run of the model on shapes.

    Linears (and the ``Conv1D`` of transformers) whose output features reach other Linears
    head by head or element by element become column-wise, those that read them row-wise.
    One whose features are split first, such as a fused QKV, is cut part by part. A Linear
    that makes the model's output becomes column-wise with a gathered output; embeddings
    are cut by rows, packed experts as the model's own ``tp_plan`` says. Routers beside
    those, the narrow half of a LoRA adapter, norms and biases stay whole; a norm of each
    head sums its gradients. Everything else must be named in ``leave``, or is an error:
    nothing is left out silently.

    Args:
        model: The model; it is not changed, and may be on the meta device.
        example_inputs: Its inputs, positional ones as a tuple or by name; only shapes
            are used. Default: token ids for a model with an embedding, else features
            for its first Linear.
        leave: Patterns of modules to keep whole on every rank, with all inside them.

    Raises:
        PlanError: Some modules could not be placed; says which, and why.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> auto_plan(model)
        Plan({'0': ColwiseParallel(), '2': RowwiseParallel()})
    """
    tree = module_tree(model)
    left = _left(model, tree, leave)
    try:
        inputs = example_inputs
        if inputs is None:
            inputs = guess_inputs(model, _BATCH, _SEQ)
        flow = follow(model, inputs)
    except NotRunnableError as error:
        fix = "Pass example_inputs=, or write" if example_inputs is None else "Write"
        raise PlanError(
            f"auto_plan: {type(model).__name__} does not run on shapes alone "
            f"({error}). {fix} a Plan by hand."
        ) from error
    if flow.gaps:
        raise PlanError(
            f"auto_plan: {type(model).__name__} computes with something that is not a "
            f"torch function before it calls {flow.gaps[0]} (a scripted function, a "
            "compiled module): features cannot be followed through it. Write a Plan by "
            "hand."
        )
    experts = {p: s for p, s in packed_experts(model).items() if p not in left}
    styles = _place(model, flow, left) | experts
    # What lies beside packed experts chooses among them, and stays whole.
    beside = {path.rpartition(".")[0] for path in experts}
    routers = {
        p for p in tree if p.rpartition(".")[0] in beside and p not in flow.linears
    }
    problems = _unplaced(model, flow, styles, left | routers)
    problems += _unsummed(flow, styles, left)
    if problems:
        raise PlanError(_text(model, problems))
    if flow.fused:
        styles = _choose_splits(model, styles, inputs)
    plan = Plan(shortest_patterns(tree, styles))
    resolve(plan, model, {"tp": 1}, call="auto_plan")  # ties, for instance
    return plan


def _choose_splits(
    model: nn.Module, styles: dict[str, Style], inputs: Inputs
) -> dict[str, Style]:
    """Parts of fused layers as DTensors where the forward reshapes by whole sizes."""
    plan = Plan(shortest_patterns(module_tree(model), styles))
    while True:
        failure = _find_failure(plan, model, inputs)
        found = {
            path: style
            for path, style in styles.items()
            if isinstance(style, FusedColwiseParallel) and style.use_local_output
        }
        if failure is None or not found:
            return styles
        inside = [p for p in found if p.rpartition(".")[0] == failure.path] or found
        changed = {p: replace(found[p], use_local_output=False) for p in inside}
        styles = styles | changed
        plan = plan | shortest_patterns(module_tree(model), changed)


def _find_failure(
    plan: Plan, model: nn.Module, inputs: Inputs
) -> NotRunnableError | None:
    """Why the forward runs on the shapes of one rank for no number of ranks."""
    assignments = resolve(plan, model, {"tp": 1}, call="auto_plan").assignments
    failures = []
    for num_ranks in _RANKS:
        failure = find_fixed_sizes(model, assignments, inputs, num_ranks)
        if failure is None:
            return None
        failures.append(failure)
    # Heads that do not divide over so many ranks fail before any module runs.
    return max(failures, key=lambda failure: bool(failure.path))


def _left(
    model: nn.Module, tree: Mapping[str, nn.Module], leave: Collection[str]
) -> frozenset[str]:
    """The paths to leave alone: those that are named, and all inside them."""
    problems = [explain_no_match(tree, p) for p in leave if not match(tree, p)]
    if problems:
        raise PlanError(_text(model, [f"leave: {problem}" for problem in problems]))
    named = [path for pattern in leave for path in match(tree, pattern)]
    return frozenset(
        path
        for path in tree
        if any(not n or path == n or path.startswith(f"{n}.") for n in named)
    )


def _place(model: nn.Module, flow: Flow, left: frozenset[str]) -> dict[str, Style]:
    rows = _row_wise(flow, left)
    styles: dict[str, Style] = {}
    for path in flow.embeddings:
        if path not in left:
            styles[path] = _TABLE
    for path in flow.linears:
        if path in rows:
            columns = _sources(flow, path)
            styles |= {source: _column_wise(model, flow, source) for source in columns}
            styles[path] = _ROWWISE
        elif (
            path not in left and path not in styles and flow.ends.get(path) == [OUTPUT]
        ):
            styles[path] = _HEAD
    for path in flow.linears:
        if (
            path not in styles
            and path not in left
            and _is_narrow(model, flow, path, styles)
        ):
            styles[path] = ReplicateParallel()
    for path, trail in flow.summed.items():
        if trail.sources <= styles.keys() and path not in left:
            styles[path] = SequenceParallel(
                sequence_dim=trail.dim, use_local_output=True
            )
    in_order = (*flow.embeddings, *flow.linears, *flow.summed)
    return {path: styles[path] for path in in_order if path in styles}


def _column_wise(model: nn.Module, flow: Flow, path: str) -> Style:
    """Column-wise; part by part where the features are split."""
    parts = flow.fused.get(path)
    if parts is None:
        return _COLWISE
    parent = path.rpartition(".")[0]
    size = head_size(model.get_submodule(parent)) if path else None
    heads = None
    if size is not None and not any(part % size for part in parts):
        heads = tuple(part // size for part in parts)
    return FusedColwiseParallel(parts=parts, num_heads=heads, split_whole=True)


def _is_narrow(
    model: nn.Module, flow: Flow, path: str, styles: Mapping[str, Style]
) -> bool:
    """Whether it is the small half of two Linears in a row, as in a LoRA adapter.

    Before a column-wise half it makes the few features that all ranks read; behind a
    row-wise half it reads the few features that all ranks have after the sum.
    """
    form = linear_form(model.get_submodule(path))
    assert form is not None
    readers, sources = _readers(flow).get(path, set()), _sources(flow, path)
    if readers and path not in flow.ends:
        wide = [linear_form(model.get_submodule(reader)) for reader in readers]
        is_first = all(styles.get(reader) == _COLWISE for reader in readers)
        sizes = [form.inside, *(other.outside for other in wide if other)]
        return is_first and form.outside < min(sizes)
    is_second = bool(sources) and all(styles.get(s) == _ROWWISE for s in sources)
    return is_second and form.inside < form.outside


def _sources(flow: Flow, path: str) -> frozenset[str]:
    return frozenset().union(*flow.fed_by[path])


def _row_wise(flow: Flow, left: frozenset[str]) -> set[str]:
    """The Linears that can read shards: all they read comes from Linears that give them."""
    rows: set[str] = set()
    fed = {path for path in flow.linears if all(flow.fed_by[path])}
    for path in flow.linears:
        sources = _sources(flow, path)
        # What is added to the output of a column-wise Linear must be a shard as well.
        is_added = bool(flow.added.get(path, set()) - fed)
        # In a chain of three, the first two make the pair: the second cannot be both.
        if path in fed and path not in left and not is_added:
            if not sources & (rows | left):
                rows.add(path)
    readers = _readers(flow)
    while True:
        bad = {
            path
            for path in rows
            for source in _sources(flow, path)
            if source in flow.ends or not readers[source] <= rows
        }
        if not bad:
            return rows
        rows -= bad


def _readers(flow: Flow) -> dict[str, set[str]]:
    """For each Linear, those that read its features."""
    readers: dict[str, set[str]] = {}
    for path in flow.linears:
        for source in _sources(flow, path):
            readers.setdefault(source, set()).add(path)
    return readers


def _unplaced(
    model: nn.Module, flow: Flow, styles: Mapping[str, Style], left: frozenset[str]
) -> list[str]:
    """Every module with a matrix of its own that gets no style and was not left."""
    problems = []
    for path, module in model.named_modules():
        matrices = [
            name
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim > 1
        ]
        if matrices and path not in styles and path not in left:
            problems.append(f"'{path}': {_reason(flow, path, module, matrices)}")
    return problems


def _unsummed(
    flow: Flow, styles: Mapping[str, Style], left: frozenset[str]
) -> list[str]:
    """Modules that are left without a style on shards of features."""
    return [
        f"'{path}' works on the shards of {_named(trail.sources)}, so that its gradients "
        "must be summed: do not leave it"
        for path, trail in flow.summed.items()
        if path in left and trail.sources & styles.keys()
    ]


def _named(paths: Iterable[str]) -> str:
    return ", ".join(f"'{path}'" for path in sorted(paths))


def _reason(flow: Flow, path: str, module: nn.Module, matrices: list[str]) -> str:
    if linear_form(module) is None and not isinstance(module, nn.Embedding):
        return (
            f"{type(module).__name__} has parameters of its own "
            f"({', '.join(matrices)}), and no rule says how to cut them"
        )
    if path not in flow.linears and path not in flow.embeddings:
        kind = type(module).__name__
        if isinstance(module, nn.Embedding) and type(module) is not nn.Embedding:
            return f"it was not called, or {kind} reads its rows in a way of its own"
        if isinstance(module, nn.Embedding) or is_plain_linear(module):
            return "it was not called in the run"
        return f"its class is {kind}, not plain nn.Linear"
    if path in flow.linears and (sources := _sources(flow, path)):
        names = _named(sources)
        return f"it reads the features of {names}, which are needed whole elsewhere"
    if path in flow.ends:
        return f"its output features are needed whole: {'; '.join(flow.ends[path])}"
    readers = _readers(flow).get(path)
    if readers:
        return f"it feeds {_named(readers)}, which cannot be row-wise"
    return "it neither feeds a Linear nor makes an output of the model"


def _text(model: nn.Module, problems: list[str]) -> str:
    lines = "\n".join(f"  * {problem}" for problem in fold_texts(problems))
    return (
        f"auto_plan: not everything in {type(model).__name__} could be placed\n\n{lines}"
        "\n\nName these in leave= to keep them whole on every rank, or write a Plan by "
        "hand."
    )
