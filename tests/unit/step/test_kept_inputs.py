"""Inputs that an overlapped step keeps for the next one: copied with their strides."""

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torchspmd.step import IterGraphModule, compile
from torchspmd.step.deferral.forms import add_copy
from torchspmd.step.graph.metadata import OutputKind, OutputRole, set_roles
from torchspmd.step.lower.pending_in_place import FormsInPlace
from torchspmd.step.passes.defer import isolate_update

aten = torch.ops.aten


def numbers():
    return torch.arange(24.0)


LAYOUTS = {
    "dense": lambda: numbers().view(4, 6),
    "turned": lambda: numbers().view(4, 6).t(),
    "of a picture": lambda: (
        numbers().view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    ),
    "expanded": lambda: numbers()[:6].expand(4, 6),
    "expanded number": lambda: numbers()[3].expand(4),
    "every second": lambda: numbers().view(4, 6)[:, ::2],
    "a part": lambda: numbers().view(4, 6)[:, 1:4],
    "a part, expanded": lambda: numbers()[1:9:2].expand(3, 4),
    "overlapping": lambda: numbers().unfold(0, 4, 2),
    "a number": lambda: numbers()[3],
    "nothing": lambda: numbers().view(4, 6)[:0, ::2],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_has_the_strides_of_the_original(name):
    given = LAYOUTS[name]()
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = FakeTensorMode().from_tensor(given)
    made = add_copy(graph, node)
    graph.output(made)
    copy = fx.GraphModule({}, graph)(given)
    assert copy.stride() == made.meta["val"].stride() == given.stride()
    assert torch.equal(copy, given)
    given.untyped_storage().fill_(0)
    assert torch.equal(copy, LAYOUTS[name]())


def iteration(given, read, **options):
    """`w -= read(x)`, all of it left for the next iteration."""
    graph = fx.Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    with FakeTensorMode() as mode:
        for node, value in ((w, torch.zeros(4)), (x, mode.from_tensor(given))):
            node.meta["val"] = value
        seen = graph.call_function(read[0], (x, *read[1:]))
        new = graph.call_function(aten.sub.Tensor, (w, seen))
        total = graph.call_function(aten.sum.default, (w,))
        seen.meta["val"] = new.meta["val"] = torch.zeros(4)
        total.meta["val"] = torch.zeros(())
    graph.output([new, total])
    set_roles(graph, [OutputRole(OutputKind.STATE, 0), OutputRole(OutputKind.RESULT)])
    module = IterGraphModule(fx.GraphModule({}, graph), **options)
    nodes = {node.name: node for node in module.graph.nodes}
    region = [nodes[seen.name], nodes[new.name]]
    module.graph.move_to_next_iter_before(region, nodes[total.name])
    return module


def train(module, given, ends=True):
    """The state after three steps; the caller uses the input's memory again."""
    state = torch.zeros(4)
    for step in range(3):
        given.untyped_storage().copy_(numbers().add_(step).untyped_storage())
        new, _ = module(state, given, last_iter=ends and step == 2)
        if new is not None:
            state.copy_(new)
    return state


@pytest.mark.parametrize(
    ("given", "stride"),
    [(numbers()[:8:2], 2), (numbers()[:1].expand(4), 0), (numbers()[:4], 1)],
    ids=["gaps", "expanded", "dense"],
)
def test_what_is_pending_reads_the_input_as_it_lay(given, stride):
    module = iteration(given, (aten.as_strided.default, [4], [stride]))
    expected = -sum(numbers().add(n).as_strided([4], [stride]) for n in range(3))
    assert torch.equal(train(module, given), expected)


def test_compiled_steps_take_what_the_one_before_kept():
    """Compiled code refuses other strides than those that it was made for."""
    given = numbers()[:8:2]
    module = iteration(given, (aten.neg.default,), enable_inductor=True)
    state = train(module, given, ends=False)
    assert torch.equal(state, sum(numbers()[:8:2] + n for n in range(2)))


# Values that are carried to the next iteration and lie in the memory of an input.

VIEWS = {
    "a view": lambda x: aten.view.default(x, [6]),
    "an unsafe view": lambda x: aten._unsafe_view.default(x, [6]),
    "a piece of a split": lambda x: aten.split.Tensor(x, 1)[1],
    "a view of a piece": lambda x: aten.view.default(aten.split.Tensor(x, 1)[0], [3]),
    "one of all rows": lambda x: aten.unbind.int(x)[1],
    "detached": aten.detach.default,
}


def deferred(step, names, place, given):
    """A step of some states and an input, with nodes moved to the next iteration."""
    captured = make_fx(step, tracing_mode="fake")(*given)
    states = [OutputRole(OutputKind.STATE, place) for place in range(len(given) - 1)]
    set_roles(captured.graph, [*states, OutputRole(OutputKind.RESULT)])
    module = IterGraphModule(captured)
    nodes = {node.name: node for node in module.graph.nodes}
    region = [nodes[name] for name in names]
    module.graph.move_to_next_iter_before(region, nodes[place], strict=True)
    forms = FormsInPlace(module, module.main_gm, None)
    module.finalize_setup(forms.make_ready)
    return module


def run(module, given, *, last):
    *new, _ = module(*given, last_iter=last)
    for old, value in zip(given, new, strict=False):
        if value is not None and value is not old:
            old.copy_(value)


REGIONS = [(name, ("sum_1", "sub")) for name in VIEWS]
REGIONS += [("a piece of a split", ("getitem_1", "sum_1", "sub"))]


@pytest.mark.parametrize(("name", "region"), REGIONS)
def test_a_carried_view_of_an_input_is_copied(name, region):
    def step(w, x):
        new = aten.sub.Tensor(w, aten.sum.default(VIEWS[name](x)))
        return new, aten.neg.default(w)

    given = state, batch = torch.zeros(()), torch.empty(2, 3)
    module, expected = deferred(step, region, "neg", given), torch.zeros(())
    for number in range(3):
        batch.copy_(torch.arange(6.0).view(2, 3) + number)  # the memory is used again
        expected -= VIEWS[name](batch).sum()
        run(module, given, last=number == 2)
    assert torch.equal(state, expected)


def test_a_piece_of_a_state_is_read_before_the_state_is_written_in_place():
    def step(w, mean, x):
        piece = aten.split.Tensor(w, 2)[0]
        new = aten.sub.Tensor(w, aten.sum.default(x))
        return new, aten.add.Tensor(mean, piece), aten.neg.default(w)

    given = w, mean, _ = torch.ones(4), torch.zeros(2), torch.ones(3)
    module = deferred(step, ("sub", "add"), "split", given)
    for number in range(3):
        run(module, given, last=number == 2)
    assert w.tolist() == [-8.0] * 4 and mean.tolist() == [-6.0] * 2


def test_pieces_of_a_batch_that_the_caller_fills_again():
    """The gradient itself is made in the next step, of pieces of this one's batch."""

    def step(model, optim, batch):
        first, second = batch.split(2)
        loss = (model(first) - second).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()

    def defer_gradient(graph):
        module = IterGraphModule(graph)
        (gradient,) = (node for node in module.graph.nodes if node.name == "mm_1")
        region = isolate_update(module.graph, gradient)
        place = next(n for n in module.graph.nodes if n.op == "call_function")
        module.graph.move_to_next_iter_before(region, place, strict=True)
        return module

    weights = []
    for make in (compile(gm_transformation=defer_gradient), lambda plain: plain):
        torch.manual_seed(0)
        model = nn.Linear(3, 3, bias=False)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        train, batch = make(step), torch.empty(4, 3)
        for number in range(3):
            train(model, optim, batch.copy_(torch.arange(12.0).view(4, 3) / 9 - number))
        weights.append(next(model.parameters()))
    assert torch.equal(*weights)
