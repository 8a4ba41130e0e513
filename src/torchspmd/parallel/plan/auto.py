"""``auto_plan``: a plan from which Linears feed which, or the reasons why there is none."""

from collections.abc import Collection, Mapping

from torch import nn
from torch.distributed.tensor import Replicate

from torchspmd.errors import PlanError
from torchspmd.parallel.linear import ColwiseParallel, RowwiseParallel
from torchspmd.parallel.plan.flow import OUTPUT, Flow, follow
from torchspmd.parallel.plan.names import (
    explain_no_match,
    fold_texts,
    match,
    module_tree,
    shortest_patterns,
)
from torchspmd.parallel.plan.plan import Plan, Style
from torchspmd.parallel.plan.run import Inputs, NotRunnableError, guess_inputs

# Two different numbers above 1, so that shapes tell the dimensions apart.
_BATCH, _SEQ = 2, 8
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

    Linears whose output features reach other Linears head by head or element by element
    become column-wise, those that read them row-wise. A Linear that makes the model's
    output becomes column-wise with a gathered output; embeddings are cut by rows. Norms
    and biases stay whole. Everything else must be named in ``leave``, or is an error:
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
        raise PlanError(
            f"auto_plan: {type(model).__name__} does not run on shapes alone "
            f"({error}). Pass example_inputs=, or write a Plan by hand."
        ) from error
    if flow.gaps:
        raise PlanError(
            f"auto_plan: {type(model).__name__} computes with something that is not a "
            f"torch function before it calls {flow.gaps[0]} (a scripted function, a "
            "compiled module): features cannot be followed through it. Write a Plan by "
            "hand."
        )
    styles = _place(flow, left)
    problems = _unplaced(model, flow, styles, left)
    if problems:
        raise PlanError(_text(model, problems))
    return Plan(shortest_patterns(tree, styles))


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


def _place(flow: Flow, left: frozenset[str]) -> dict[str, Style]:
    rows = _row_wise(flow, left)
    styles: dict[str, Style] = {}
    for path in flow.embeddings:
        if path not in left:
            styles[path] = _TABLE
    for path in flow.linears:
        if path in rows:
            styles |= dict.fromkeys(_sources(flow, path), _COLWISE)
            styles[path] = _ROWWISE
        elif (
            path not in left and path not in styles and flow.ends.get(path) == [OUTPUT]
        ):
            styles[path] = _HEAD
    in_order = (*flow.embeddings, *flow.linears)
    return {path: styles[path] for path in in_order if path in styles}


def _sources(flow: Flow, path: str) -> frozenset[str]:
    return frozenset().union(*flow.fed_by[path])


def _row_wise(flow: Flow, left: frozenset[str]) -> set[str]:
    """The Linears that can read shards: all they read comes from Linears that give them."""
    rows: set[str] = set()
    for path in flow.linears:
        sources = _sources(flow, path)
        # In a chain of three, the first two make the pair: the second cannot be both.
        if path not in left and all(flow.fed_by[path]) and not sources & (rows | left):
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


def _reason(flow: Flow, path: str, module: nn.Module, matrices: list[str]) -> str:
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        return (
            f"{type(module).__name__} has parameters of its own "
            f"({', '.join(matrices)}), and no rule says how to cut them"
        )
    if path not in flow.linears and path not in flow.embeddings:
        return "it was not called in the run, or its class is not plain nn.Linear"
    if path in flow.linears and (sources := _sources(flow, path)):
        names = ", ".join(f"'{source}'" for source in sorted(sources))
        return f"it reads the features of {names}, which are needed whole elsewhere"
    if path in flow.ends:
        return f"its output features are needed whole: {'; '.join(flow.ends[path])}"
    readers = _readers(flow).get(path)
    if readers:
        names = ", ".join(f"'{reader}'" for reader in sorted(readers))
        return f"it feeds {names}, which cannot be row-wise"
    return "it neither feeds a Linear nor makes an output of the model"


def _text(model: nn.Module, problems: list[str]) -> str:
    lines = "\n".join(f"  * {problem}" for problem in fold_texts(problems))
    return (
        f"auto_plan: not everything in {type(model).__name__} could be placed\n\n{lines}"
        "\n\nName these in leave= to keep them whole on every rank, or write a Plan by "
        "hand."
    )
