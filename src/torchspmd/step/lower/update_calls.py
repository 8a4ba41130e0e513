"""Updates that a compiler calls as they are.

To Inductor ``_fused_adamw`` is a function from old states to new ones: every state is
copied before it, and every result after it. As one operator that says which tensors it
writes, an update stays in place, and what is noted around it stays next to it.
"""

import contextlib
import contextvars
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.deferral.module import Marks
from torchspmd.step.graph.aliases import find_aliases, written_nodes
from torchspmd.step.graph.optimizer_lists import is_fused_update
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.lower.in_place import (
    InPlaceReport,
    compute_in_place,
    written_tensors,
)

NOT_PENDING = -1  # the number of an update that this step makes for itself


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of compiled code.

    Attributes:
        marks: Called around each pending update.
        memory: Addresses that updates must write to; None where that is known already.
    """

    marks: Marks
    memory: frozenset[int] | None


# Which run calls an update cannot be an argument of its operator: that takes tensors,
# numbers and strings only, and these are part of the compiled code, which torch keeps in a
# cache for other steps and processes. Threads may run several steps at a time.
_RUN: contextvars.ContextVar[_Run] = contextvars.ContextVar("torchspmd_run")


@contextlib.contextmanager
def noting(marks: Marks, inputs: Sequence[object] | None = None) -> Iterator[None]:
    """Call marks around the pending updates that compiled code makes inside.

    Given the inputs of the compiled code, an update must write into them: what is written
    into a copy is not done when the update ends.
    """
    memory = None
    if inputs is not None:
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        memory = frozenset(tensor.data_ptr() for tensor in tensors)
    token = _RUN.set(_Run(marks, memory))
    try:
        yield
    finally:
        _RUN.reset(token)


def write_for_compiler(
    graph: fx.GraphModule,
) -> tuple[fx.GraphModule, InPlaceReport, tuple[str, ...]]:
    """A copy whose fused optimizers are calls that write in place, or else no call is.

    A compiler chooses itself where all else is computed. The last value says why no call
    is, if so.
    """
    notes: tuple[str, ...] = ()
    for may_write in (is_fused_update, _never):
        edited, _ = copy_graph(graph.graph)
        written = written_tensors(edited)
        report = compute_in_place(edited, written, may_write=may_write)
        updates = [n for n in edited.nodes if is_fused_update(n) and written_nodes(n)]
        problems = (make_one_call(edited, [node], NOT_PENDING) for node in updates)
        problem = next(filter(None, problems), None)
        if problem is None:
            break
        notes += (f"Inductor copies the states of fused optimizers: {problem}",)
    return _torch.lazy_module(graph, edited), report, notes


def _never(_: fx.Node) -> bool:
    return False


def make_one_call(graph: fx.Graph, nodes: Sequence[fx.Node], number: int) -> str | None:
    """Replace neighbours that write into the graph's inputs by one operator.

    Returns:
        Why that cannot be done, if it cannot; then the graph is as it was.
    """
    aliases = find_aliases(graph)
    inside = set(nodes)
    written = list(dict.fromkeys(t for node in nodes for t in written_nodes(node)))
    sources = dict.fromkeys(s for node in nodes for s in node.all_input_nodes)
    read = [s for s in sources if s not in inside and s not in written]
    memory = {aliases.root[target] for target in written}
    for node in nodes:
        if not inside.issuperset(node.users):
            return f"{node.name} is used outside of the update"
    for source in (*written, *read):
        if not isinstance(source.meta.get("val"), torch.Tensor):
            return f"{source.name} is no tensor"
        if source in read and aliases.root[source] in memory:
            return f"{source.name} is read where the update writes"
        if source in written and source.op != "placeholder":
            return f"{source.name} is written and is no state"
    body = _body(nodes, written, read)
    name = hashlib.sha256(body.code.encode()).hexdigest()
    operator = _torch.update_operator(name, _noted(body))
    with graph.inserting_before(nodes[0]):
        call = graph.call_function(operator, (name, number, written, read))
    call.meta = {key: value for key, value in nodes[-1].meta.items() if key != "val"}
    for node in reversed(nodes):
        graph.erase_node(node)
    return None


def _body(
    nodes: Sequence[fx.Node], written: Sequence[fx.Node], read: Sequence[fx.Node]
) -> fx.GraphModule:
    """The nodes as a graph of their own, with numbered names: equal for equal work."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for place, source in enumerate((*written, *read)):
        copies[source] = graph.placeholder(f"input_{place}")
    for node in nodes:
        assert callable(node.target)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.call_function(node.target, args, kwargs)
    graph.output(None)
    return fx.GraphModule({}, graph)


def _noted(body: Callable[..., Any]) -> _torch.Update:
    def update(
        number: int, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]
    ) -> None:
        if number == NOT_PENDING:
            body(*written, *read)
            return
        run = _RUN.get()
        if run.memory is not None:
            _check_memory(written, run.memory)
        run.marks.begin(number)
        body(*written, *read)
        run.marks.end(number)

    return update


def _check_memory(written: Sequence[torch.Tensor], memory: Collection[int]) -> None:
    strange = sum(tensor.data_ptr() not in memory for tensor in written)
    if strange:
        raise CaptureError(
            f"compile: Inductor gave an update copies of {strange} of its {len(written)} "
            "states. A step that fails after it could not tell what is done. Use "
            "backend='graph', or overlap=False."
        )
