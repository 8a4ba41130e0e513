"""Pending updates are made in place, and an exception anywhere loses nothing silently."""

import contextlib
import copy
import functools
import re

import pytest
import torch
from _memory import MemoryCounter
from torch import fx, nn
from training import train, train_keeping_gradients

from torchspmd.errors import CaptureError, LostStateError, UsageError
from torchspmd.step import IterGraphModule, compile, find_node
from torchspmd.step.deferral.state import State
from torchspmd.step.flush_hooks import without_flushing
from torchspmd.step.graph.memory import predict_peak
from torchspmd.step.graph.metadata import OutputKind, output_values, roles_of
from torchspmd.step.lower.in_place import write_in_place
from torchspmd.step.passes.defer import isolate_update

pytestmark = [pytest.mark.filterwarnings("ignore:.*little or nothing overlaps")]

OPTIMIZERS = {
    "fused adam": functools.partial(torch.optim.Adam, lr=0.01, fused=True),
    "foreach adamw": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "plain adam": functools.partial(
        torch.optim.Adam, lr=0.01, foreach=False, weight_decay=0.1
    ),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def defer_two_regions(gm):
    """The last layer's update, and apart from it the second layer's."""
    gm = IterGraphModule(gm)
    for gradient, place in (("t_6", "t_2"), ("t_10", "t_1")):
        nodes = [
            find_node(gm.graph, lambda node, n=name: node.name == n)[0]
            for name in (gradient, place)
        ]
        region = isolate_update(gm.graph, nodes[0])
        gm.graph.move_to_next_iter_before(region, nodes[1], strict=True)
    return gm


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator) for _ in range(count)]


class Training:
    """A model with buffers, its optimizer, and a step that can be made to fail."""

    def __init__(self, name, function=train):
        torch.manual_seed(0)
        linear = functools.partial(nn.Linear, 4, 4, bias=False)
        norm = nn.BatchNorm1d(4, affine=False)
        self.model = nn.Sequential(linear(), linear(), norm, linear())
        self.optim = OPTIMIZERS[name](self.model.parameters())
        function(self.model, self.optim, torch.eye(4)[:3])
        self.saved = self.snapshot()
        self.eager = functools.partial(function, self.model, self.optim)
        self.compiled = compile(gm_transformation=defer_two_regions)(function)

    def step(self, batch, **keywords):
        return self.compiled(self.model, self.optim, batch, **keywords)

    @property
    def run(self):
        return self.compiled.programs[-1].run

    def snapshot(self):
        return copy.deepcopy((self.model.state_dict(), self.optim.state_dict()))

    def tensors(self):
        """As they are, which flushes nothing."""
        found = []
        with without_flushing():
            for module in self.model._modules.values():
                found += [*module._parameters.values(), *module._buffers.values()]
        found += [v for s in self.optim.state.values() for v in s.values()]
        return [each for each in found if isinstance(each, torch.Tensor)]

    def load(self, saved=None):
        model, optim = copy.deepcopy(saved or self.saved)
        self.model.load_state_dict(model)
        self.optim.load_state_dict(optim)

    def expected(self, count):
        """The states after so many eager steps."""
        self.load()
        for batch in batches(count):
            self.eager(batch)
        result = self.snapshot()
        self.load()
        self.optim.zero_grad()
        return result

    def runs(self, form):
        """The graph that is run, without what `break_at` put into it."""
        run = self.run._forms._runs[form]
        return getattr(run, "plain", run)

    @contextlib.contextmanager
    def break_at(self, form, place, error=RuntimeError):
        """Let a form raise before its node of this place."""
        breaking = self.run._forms._runs[form]
        if not hasattr(breaking, "plain"):
            breaking = self.run._forms._runs[form] = instrumented(breaking)
        Breaker.at, Breaker.error = (id(breaking.plain), place), error
        with pytest.raises(error, match="the cable") as caught:
            yield caught
        Breaker.at = None


class Breaker:
    """Where to fail, and how."""

    at = None
    error = RuntimeError

    def __init__(self, graph):
        self.graph, self.__name__ = graph, "pass_by"

    def __call__(self, place):
        if Breaker.at == (self.graph, place):
            raise Breaker.error("the cable")


def instrumented(plain):
    """A graph with a place to fail before each node."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(plain.graph, {}))
    breaker = Breaker(id(plain))
    for place, node in enumerate(nodes_of(graph)):
        with graph.inserting_before(node):
            graph.call_function(breaker, (place,))
    made = fx.GraphModule(plain.module, graph)
    made.plain = plain
    return made


def nodes_of(graph):
    return [node for node in graph.nodes if node.op != "placeholder"]


def is_mark(node):
    return getattr(node.target, "__name__", "") in ("_begin", "_end")


def half_way_places(graph):
    """Places at which a region has begun and is not done, each with its number."""
    found, now = {}, None
    for place, node in enumerate(nodes_of(graph)):
        if now is not None:
            found[place] = now
        if is_mark(node):
            now = node.args[0] if node.target.__name__ == "_begin" else None
    return found


def assert_equal(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        for a, b in zip(tensors_in(one), tensors_in(other), strict=True):
            assert torch.equal(a, b)


def tensors_in(state):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(state) if is_tensor(leaf)]


def is_tensor(value):
    return isinstance(value, torch.Tensor)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Thousands of tiny operators: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=OPTIMIZERS)
def training(request):
    made = Training(request.param)
    made.references = {count: made.expected(count) for count in (1, 2, 3)}
    made.load()
    made.step(batches(1)[0])
    made.compiled.flush()
    return made


# What is run.


def test_pending_states_lie_where_they_lay(training):
    """Every state of a pending region is an input of the steady form; others are not."""
    training.load()
    first, second, third = batches(3)
    training.step(first)
    training.step(second)
    places = [each.data_ptr() for each in training.tensors()]
    versions = [each._version for each in training.tensors()]
    running = training.runs("steady").graph
    pending = set(training.run.states_of({0, 1}))
    assert pending
    inputs = running.find_nodes(op="placeholder")
    for value, role in zip(output_values(running), roles_of(running), strict=True):
        if role.kind is OutputKind.STATE:
            assert (value in inputs) == (role.placeholder in pending)
    training.step(third)
    assert places == [each.data_ptr() for each in training.tensors()]
    assert versions != [each._version for each in training.tensors()]
    training.compiled.flush()
    assert "2 of 2 pending updates are made in place" in training.compiled.explain()
    assert_equal(training.snapshot(), training.references[3])


def test_states_are_not_kept_twice(training):
    """As predicted and as counted; fresh states would need their size in addition."""
    training.load()
    first, second = batches(2)
    training.step(first)
    form = training.run.forms["steady"]
    peak = predict_peak(training.runs("steady").graph)
    fresh = predict_peak(write_in_place(form, keep_inputs=True)[0].graph)
    assert peak.total_bytes < fresh.total_bytes
    carried = [each for each in training.run._pending.carried if is_tensor(each)]
    counter = MemoryCounter([*training.tensors(), *carried, second])
    with counter:
        training.step(second)
    assert counter.peak_bytes == peak.total_bytes
    assert f"memory of an overlapped step: {peak}" in training.compiled.explain()
    training.compiled.flush()


def test_the_last_step_needs_no_more_memory_than_others(training):
    training.load()
    first, second = batches(2)
    training.step(first)
    peak = predict_peak(training.runs("steady").graph)
    carried = [each for each in training.run._pending.carried if is_tensor(each)]
    counter = MemoryCounter([*training.tensors(), *carried, second])
    with counter:
        training.step(second, last_train_step=True)
    assert counter.peak_bytes == peak.total_bytes
    assert not training.run.is_pending
    assert_equal(training.snapshot(), training.references[2])


def test_a_last_step_whose_updates_fail_is_not_to_be_repeated(training):
    training.load()
    first, second = batches(2)
    training.step(first)
    with training.break_at("flush", 0) as caught:
        training.step(second, last_train_step=True)
    assert caught.value.__notes__ == [
        "train: the last step was made, but not all of its updates. Call flush() for "
        "the rest; do not run the step again."
    ]
    training.compiled.flush()
    assert_equal(training.snapshot(), training.references[2])


def test_marks_enclose_writes_only(training):
    for form in ("steady", "flush"):
        training.load()
        training.step(batches(1)[0])
        training.compiled.flush()
        marks = [
            (node.target.__name__, node.args[0])
            for node in training.runs(form).graph.nodes
            if is_mark(node)
        ]
        assert len(marks) == 4
        for begin, end in zip(marks[::2], marks[1::2], strict=True):
            assert (begin[0], end[0]) == ("_begin", "_end") and begin[1] == end[1]


# An exception at every place.


def recover(training, how, batch):
    """Go on after an exception in the second step; the number of steps then made."""
    if how == "retry":
        training.step(batch)
        training.compiled.flush()
        return 2
    if how == "retry as the last":
        training.step(batch, last_train_step=True)
        return 2
    if how == "flush":
        training.compiled.flush()
    return 1  # a snapshot flushes by itself


WAYS_ON = ["retry", "retry as the last", "flush", "state_dict"]


@pytest.mark.parametrize("how", WAYS_ON)
def test_an_exception_at_every_node(training, how):
    first, second = batches(2)
    graph = training.runs("steady").graph
    lost = half_way_places(graph)
    error = KeyboardInterrupt if how == "flush" else RuntimeError
    for place in range(len(nodes_of(graph))):
        if place in lost:
            continue
        training.load()
        training.step(first)
        with training.break_at("steady", place, error):
            training.step(second)
        count = recover(training, how, second)
        assert_equal(training.snapshot(), training.references[count])
        assert not training.run.is_pending


def test_an_exception_at_every_node_of_a_flush(training):
    first, second = batches(2)
    graph = training.runs("flush").graph
    lost = half_way_places(graph)
    for place in range(len(nodes_of(graph))):
        if place in lost:
            continue
        training.load()
        training.step(first)
        with training.break_at("flush", place):
            training.model.state_dict()
        assert_equal(training.snapshot(), training.references[1])
        training.step(second, last_train_step=True)
        assert_equal(training.snapshot(), training.references[2])


def no_memory(*inputs):
    raise MemoryError


def test_exceptions_one_after_another(training):
    """In a step, in the flush of the rest, in the step that is repeated."""
    first, second = batches(2)
    graph = training.runs("steady").graph
    ends = [n for n, node in enumerate(nodes_of(graph)) if is_mark(node)][1::2]
    training.load()
    training.step(first)
    with training.break_at("steady", ends[0] + 1):
        training.step(second)
    assert len(training.run.unfinished) == 1
    prepare = training.run._forms._prepare
    training.run._forms._prepare = lambda name, form: no_memory
    with pytest.raises(MemoryError):
        training.step(second)
    training.run._forms._prepare = prepare
    assert len(training.run.unfinished) == 1
    training.compiled.flush()
    training.step(second)
    with training.break_at("steady", ends[0] + 1):
        training.step(second)
    training.compiled.flush()
    assert_equal(training.snapshot(), training.references[2])


# Half-way.

LOOKS = [
    lambda training: training.step(batches(2)[1]),
    lambda training: training.compiled.flush(),
    lambda training: training.compiled.close(),
    lambda training: training.model.state_dict(),
    lambda training: training.optim.state_dict(),
    lambda training: training.optim.step(),
    lambda training: training.model(torch.ones(2, 4)),
    lambda training: training.run(),
]


def test_half_way_is_refused_until_a_checkpoint_is_loaded(training):
    first, second = batches(2)
    graph = training.runs("steady").graph
    places = half_way_places(graph)
    for turn, (place, region) in enumerate(places.items()):
        training.load()
        training.step(first)
        with training.break_at("steady", place):
            training.step(second)
        assert (
            training.run.state is State.UPDATING and region in training.run.unfinished
        )
        looks = LOOKS if turn == 0 else [LOOKS[turn % len(LOOKS)]]
        for look in looks:
            with pytest.raises(LostStateError, match="states of an overlapped step"):
                look(training)
        training.model.load_state_dict(training.saved[0])
        with pytest.raises(LostStateError) as caught:
            training.step(second)
        assert "exp_avg" in str(caught.value) or "momentum" in str(caught.value)
        assert "weight," not in str(caught.value)  # that was loaded
    training.load()
    training.step(first)
    training.step(second, last_train_step=True)
    assert_equal(training.snapshot(), training.references[2])


def test_words_of_a_lost_state():
    training = Training("fused adam")
    first, second = batches(2)
    training.step(first)
    graph = training.runs("steady").graph
    with pytest.raises(KeyError) as outer, training.compiled:
        with training.break_at("steady", max(half_way_places(graph))):
            training.step(second)
        raise KeyError("the user's own")
    note = outer.value.__notes__[0]
    assert "the pending update could not be made: 4 states of an over" in note
    with pytest.raises(LostStateError) as caught:
        training.step(second)
    text = str(caught.value)
    assert "Sequential.3.weight" in text and "Sequential.3.weight.exp_avg" in text
    assert "neither the old nor the new values. Load a checkpoint" in text
    with pytest.raises(LostStateError, match="4 states"):
        training.model.load_state_dict({}, strict=False)  # loads nothing
        training.step(second)
    assert not re.search(r"tensor\(|-?\d\.\d", text)
    training.load()
    training.compiled.close()  # what was pending is dropped


def test_the_module_itself_asks_for_a_flush():
    training = Training("momentum")
    first, second = batches(2)
    training.step(first)
    graph = training.runs("steady").graph
    last = len(nodes_of(graph)) - 1
    with training.break_at("steady", last):
        training.step(second)
    assert training.run.state is State.PARTLY_DONE and not training.run.unfinished
    with pytest.raises(UsageError, match=r"Call flush\(\) to do the rest"):
        training.run()
    training.compiled.flush()


# Updates that cannot be made in place as a whole.


def test_an_update_that_leaves_a_gradient_is_not_made_in_place():
    training = Training("fused adam", train_keeping_gradients)
    expected = training.expected(3)
    first, second, third = batches(3)
    training.step(first)  # another program: it finds no gradients
    training.step(second)
    training.step(second)  # as the one before: the gradients are others
    text = training.compiled.explain()
    assert "0 of 2 pending updates are made in place" in text
    assert "update 1 is not: it leaves a gradient" in text
    training.load()
    for batch in (first, second):
        training.step(batch)
    training.compiled.flush()
    training.step(third)
    training.compiled.flush()
    assert_equal(training.snapshot(), expected)


def test_a_cuda_graph_takes_no_pending_work(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    training = Training("momentum")
    step = compile(gm_transformation=defer_two_regions, backend="cudagraph")(train)
    with pytest.raises(
        CaptureError, match="it takes no work that is left for the next"
    ):
        step(training.model, training.optim, batches(1)[0])
