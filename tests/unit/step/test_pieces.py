"""A graph as pieces for a compiler: which, which are equal, and what runs as it is."""

import gc
import linecache
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from torchspmd import _torch
from torchspmd.step.graph.inductor import CompiledPieces, lower
from torchspmd.step.graph.metadata import output_values
from torchspmd.step.graph.pieces import Piece, find_steps

aten = torch.ops.aten


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def pieces_of(graph):
    return [step for step in find_steps(graph) if isinstance(step, Piece)]


def names(step):
    nodes = step.nodes if isinstance(step, Piece) else (step,)
    return [getattr(node.target, "__name__", "").split(".")[0] for node in nodes]


@pytest.fixture
def compiled_graphs(monkeypatch):
    """What the compiler gets; it is run as it is."""
    seen = []

    def made(graph, inputs):
        seen.append(graph)

        def run(args):
            taken = [*args]
            args.clear()
            return fx.Interpreter(graph).boxed_run(taken)

        return run, "not compiled"

    monkeypatch.setattr(_torch, "compile_with_inductor", made)
    return seen


def layers(x, *weights):
    for weight in weights:
        x = (x @ weight).relu() * 2 + x
    return [x]


def test_equal_layers_are_compiled_once(compiled_graphs):
    inputs = [torch.randn(3, 3) for _ in range(5)]
    graph = traced(layers, *inputs)
    run, told = lower(graph)
    assert len(compiled_graphs) == 1
    assert "4 pieces, 1 of them different, 1 of them new, and 4 operators" in told
    assert torch.equal(run(*inputs)[0], graph(*inputs)[0])


def test_graphs_of_one_step_share_what_is_compiled(compiled_graphs):
    compiled = CompiledPieces()
    for count in (2, 4):
        inputs = [torch.randn(3, 3) for _ in range(count)]
        lower(traced(layers, *inputs), compiled)
    assert len(compiled_graphs) == 1


def two(function, *inputs):
    (piece,) = pieces_of(traced(function, *inputs))
    return piece.form()


X = torch.ones(4, 4)
DIFFERENT = {
    "an operator": (lambda x: [(x + 1).sin()], X),
    "a constant": (lambda x: [(x + 2).cos()], X),
    "its type": (lambda x: [(x + 1.0).cos()], X),
    "a shape": (lambda x: [(x + 1).cos()], torch.ones(4, 5)),
    "strides": (lambda x: [(x + 1).cos()], X.t().contiguous().t()),
    "a dtype": (lambda x: [(x + 1).cos()], X.double()),
    "an output": (lambda x: [y := x + 1, y.cos()], X),
    "an input": (lambda x, y: [(x + y).cos()], X, X.clone()),
}


def test_what_differs_has_another_form():
    forms = {name: two(*case) for name, case in DIFFERENT.items()}
    forms["the same"] = two(lambda x: [(x + 1).cos()], X)
    assert len({*forms.values()}) == len(forms)
    assert two(lambda x: [(x + 1).cos()], X.clone()) == forms["the same"]
    one, both = torch.ones(4, 4), torch.ones(4, 4)
    assert two(lambda x, y: [(x + y).cos()], one, both) == forms["an input"]


def test_inputs_whose_memory_begins_elsewhere_have_another_form():
    """Vector loads need aligned memory."""
    base = torch.ones(17)
    forms = {two(lambda x: [(x + 1).cos()], base[n : n + 8]) for n in (0, 1, 2, 4, 8)}
    assert len(forms) == 2


def test_one_operator_alone_and_library_calls_run_as_they_are():
    graph = traced(lambda x, w: [((x @ w).relu() @ w).t().contiguous()], X, X)
    assert pieces_of(graph) == []
    steps = [name for step in find_steps(graph) for name in names(step)]
    assert steps == ["mm", "relu", "mm", "t", "clone"]


def test_an_operator_joins_the_piece_that_made_its_input():
    """The sum of a gradient stands behind the products that read the gradient."""
    graph = traced(lambda x, w: [(y := (x + 1).relu()) @ w, w @ y, y.sum(0)], X, X)
    first, *rest = find_steps(graph)
    assert names(first) == ["add", "relu", "sum"]
    assert [names(step) for step in rest] == [["mm"], ["mm"]]


def test_views_are_made_where_they_are_needed():
    def step(x, w):
        view = (x.cos() + 1).t()
        product = view @ w
        return [(view * product).sin(), view]

    graph = traced(step, X, X)
    first, view, product, last = find_steps(graph)
    assert [node.name for node in first.outputs] == ["add"]
    assert (names(view), names(product)) == (["t"], ["mm"])
    assert last.inputs[0] is first.outputs[0]  # of which it makes the view itself
    assert output_values(graph.graph)[1] is view


def test_parts_of_a_value_are_taken_outside():
    """Where a part begins differs from layer to layer."""
    graph = traced(lambda x: [(p * 2).sin() @ p for p in x.split(4)], torch.ones(8, 4))
    first, second = pieces_of(graph)
    assert first.form() == second.form()


class Writes:
    """``state.copy_(state.cos() + 1)``, by hand, as lowering writes it."""

    def __init__(self, *, with_part):
        self.graph = fx.Graph()
        state, other = (self.graph.placeholder(name) for name in ("state", "other"))
        for node in (state, other):
            node.meta["val"] = torch.empty(4)
        added = other
        if with_part:
            part = self.call(aten.slice.Tensor, state, 0, 0, 2, size=2)
            added = self.call(aten.mean.default, part, size=())
        new = self.call(aten.cos.default, self.call(aten.add.Tensor, state, added))
        self.graph.call_function(aten.copy_.default, (state, new))
        self.graph.output([state])
        self.module = fx.GraphModule({}, self.graph)

    def call(self, target, *args, size=4):
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(size)
        return node


@pytest.mark.parametrize("with_part", [False, True])
def test_an_input_is_written_by_its_piece_unless_a_part_of_it_comes_in_too(with_part):
    made = Writes(with_part=with_part)
    (piece,) = pieces_of(made.module)
    assert ("copy_" in names(piece)) is not with_part
    run, _ = lower(made.module)
    state, other = torch.ones(4), torch.full((4,), 2.0)
    (result,) = run(state, other)
    assert result is state
    expected = torch.tensor(2.0 if with_part else 3.0).cos().expand(4)
    torch.testing.assert_close(state, expected)


def test_random_ops_with_a_generator_of_their_own_run_as_they_are():
    generator = torch.Generator()
    graph = fx.Graph()
    drawn = graph.call_function(aten.rand.generator, ([4],), {"generator": generator})
    drawn.meta["val"] = torch.empty(4)
    graph.output([drawn])
    assert find_steps(SimpleNamespace(graph=graph)) == [drawn]


def test_values_are_let_go_at_their_last_use(monkeypatch):
    """Also those that only the beginning of a piece needs."""
    alive = []

    def made(graph, inputs):
        def run(args):
            seen = [weakref.ref(each) for each in args]
            taken = [*args]
            args.clear()
            results = graph(*taken)
            del taken
            gc.collect()
            alive.append([ref() is not None for ref in seen])
            return results

        return run, "not compiled"

    monkeypatch.setattr(_torch, "compile_with_inductor", made)

    def step(x, w):
        used_once, kept = x @ w, w @ x
        y = (used_once + kept).cos()
        return [y @ kept]

    inputs = [torch.randn(3, 3), torch.randn(3, 3)]
    lower(traced(step, *inputs))[0](*inputs)
    assert alive == [[False, True]]


def test_a_loss_and_its_gradient_store_nothing_of_their_size_in_between():
    def loss_and_gradient(logits, targets):
        values = logits[:, :-1].clone().view(-1, 40)
        chances = aten._log_softmax(values, 1, False)
        targets = targets[:, 1:].clone().view(-1)
        loss, weight = aten.nll_loss_forward(chances, targets, None, 1, -100)
        one = torch.ones_like(loss)
        gradient = aten.nll_loss_backward(one, chances, targets, None, 1, -100, weight)
        gradient = aten._log_softmax_backward_data(gradient, chances, 1, logits.dtype)
        gradient = gradient.view(4, 7, 40)
        return loss, aten.slice_backward(gradient, [4, 8, 40], 1, 0, -1, 1)

    inputs = [torch.randn(4, 8, 40).bfloat16(), torch.randint(40, (4, 8))]
    graph = make_fx(loss_and_gradient)(*inputs)

    def compiled(graph):
        made, _ = _torch.compile_with_inductor(graph, inputs)
        return made([*inputs])

    as_on_a_gpu = {"realize_opcount_threshold": 30, "force_disable_caches": True}
    with inductor_config.patch(as_on_a_gpu):
        found, sources = run_and_get_code(compiled, graph)
    (source,) = dict.fromkeys(sources)
    assert "empty_strided_cpu((4, 8, 40)" in source
    assert "empty_strided_cpu((28, 40)" not in source
    for value, expected in zip(found, loss_and_gradient(*inputs), strict=True):
        torch.testing.assert_close(value, expected)


def test_two_inputs_with_one_example_are_two():
    """The learning rate of a step, and that of the step before, have one fake tensor."""
    graph = fx.Graph()
    now, before = graph.placeholder("now"), graph.placeholder("before")
    now.meta["val"] = before.meta["val"] = torch.tensor(0.1)
    product = graph.call_function(aten.mul.Tensor, (before, 2))
    total = graph.call_function(aten.add.Tensor, (product, now))
    product.meta["val"] = total.meta["val"] = torch.tensor(0.1)
    graph.output([total])
    run, told = lower(fx.GraphModule({}, graph))
    assert "1 pieces" in told
    assert run(torch.tensor(3.0), torch.tensor(5.0))[0].item() == 13.0


def test_an_operator_alone_waits_for_the_piece_that_reads_it():
    """Gradients of one value by three products: one kernel adds them and goes on."""
    graph = traced(lambda x, w: [(x @ w + w @ x + x @ x).cos()], X, X.clone())
    *products, piece = find_steps(graph)
    assert [names(step) for step in products] == [["mm"]] * 3
    assert names(piece) == ["add", "add", "cos"]


def test_operators_that_share_nothing_are_pieces_of_their_own():
    """Updates of equal parameters are compiled once."""
    inputs = [torch.ones(4) for _ in range(6)]
    graph = traced(lambda *args: [(x.cos() + 1).sin() for x in args], *inputs)
    assert [names(each) for each in pieces_of(graph)] == [["cos", "add", "sin"]] * 6
    assert len({each.form() for each in pieces_of(graph)}) == 1


def test_a_reshape_that_copies_is_computed_and_one_that_views_is_not():
    graph = traced(lambda x: [(x.t().reshape(16) + 1), x.reshape(16)], X)
    (piece,) = pieces_of(graph)
    assert names(piece) == ["t", "clone", "_unsafe_view", "add"]
    reshape = aten.reshape.default
    for source, is_view in ((X, True), (X.t(), False)):
        graph = fx.Graph()
        given = graph.placeholder("x")
        given.meta["val"] = source
        flat = graph.call_function(reshape, (given, [16]))
        flat.meta["val"] = source.reshape(16)
        new = graph.call_function(aten.neg.default, (flat,))
        new.meta["val"] = flat.meta["val"]
        graph.output([new])
        assert (len(pieces_of(fx.GraphModule({}, graph))) == 0) is is_view


class RandomProgram:
    """Operators, views, parts, products and writes into inputs, drawn by a seed."""

    def __init__(self, seed):
        self.seed = seed

    def __call__(self, *inputs):
        self.draw = random.Random(self.seed)
        self.values = [*inputs]
        for _ in range(30):
            self.values += self.one(self.draw.choice(self.values))
        made = [v for v in self.values if all(v is not each for each in inputs)]
        for each in inputs:  # as states are updated
            each.copy_((each * self.draw.choice(made)).sin() + 1)
        return self.draw.sample(made, 6)

    def one(self, x):
        kind = self.draw.randrange(9)
        y = self.draw.choice(self.values)
        match kind:
            case 0:
                return [x.cos() + 1, x * y]
            case 1:
                return [x @ y / 4]
            case 2:
                return [x.t()]
            case 3:
                return [(first * second).repeat(2, 1) for first, second in [x.split(2)]]
            case 4:
                return [x.sum(0, keepdim=True).expand(4, 4)]
            case 5:
                return [*torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5)[:1]]
            case 6:
                return [x.reshape(16).view(4, 4)]
            case 7:
                target = self.values[self.draw.randrange(3)]
                target.copy_((target + y).sin())
                return []
            case _:
                return [(x + y).relu()]


@pytest.mark.parametrize("seed", range(30))
def test_programs_of_all_kinds_compute_the_same(seed, compiled_graphs):
    given = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    graph = traced(RandomProgram(seed), *given)
    expected_inputs = [each.clone() for each in given]
    expected = graph(*expected_inputs)
    run, _ = lower(graph)
    found = run(*given)
    assert len(compiled_graphs) > 1
    for left, right in zip(
        (*found, *given), (*expected, *expected_inputs), strict=True
    ):
        torch.testing.assert_close(left, right)


def test_the_text_of_what_runs_is_in_tracebacks_and_goes_with_it(compiled_graphs):
    run, _ = lower(traced(layers, torch.ones(3, 3), torch.ones(3, 3)))
    file = run.__code__.co_filename
    assert "= " in linecache.getline(file, 2)
    with pytest.raises(RuntimeError) as caught:
        run(torch.ones(3, 3), torch.ones(2, 2))
    assert any(str(entry.path) == file for entry in caught.traceback)
    del run, caught
    gc.collect()
    assert file not in linecache.cache
