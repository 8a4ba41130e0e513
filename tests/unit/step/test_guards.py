"""No stale graph: what makes a compiled step capture again, and what it says."""

import warnings

import pytest
import torch
from step_models import build, difference
from torch import nn

from torchspmd.errors import CaptureWarning, SpmdError, UsageError
from torchspmd.step import CompiledStep, DataParallel, compile


def step(model, optim, batch, flag=False):
    loss = model(batch).square().mean()
    if flag:
        loss = loss * 2
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def run_both(compiled, pairs, *args, **kwargs):
    for function, pair in ((compiled, pairs[0]), (step, pairs[1])):
        torch.manual_seed(1)
        function(*pair, *args, **kwargs)


def check_recaptured(change, reason, *args, optimizer="sgd", model="mlp", **kwargs):
    """Change something between two calls: a second program, the right reason and result."""
    pairs = build(model, optimizer)
    compiled = compile(step)
    run_both(compiled, pairs, torch.randn(6, 8))
    before = len(compiled.programs)
    for pair in pairs:
        change(*pair)
    batch = args[0] if args else torch.randn(6, 8)
    run_both(compiled, pairs, batch, **kwargs)
    assert difference(*pairs) == 0.0
    assert len(compiled.programs) == before + 1
    assert reason in compiled.programs[-1].reason, compiled.programs[-1].reason
    assert reason in compiled.explain()


def nothing(model, optim):
    pass


def double(module, args, output):
    return output * 2


def test_hooks_added_later():
    check_recaptured(
        lambda model, optim: model[0].register_forward_hook(double),
        "hooks of Sequential.0: absent -> double",
    )
    check_recaptured(
        lambda model, optim: model[2].register_full_backward_hook(lambda *_: None),
        "hooks of Sequential.2: absent -> test_hooks_added_later.<locals>.<lambda>",
    )


def test_hooks_removed_or_put_in_another_order():
    (model, optim), _ = build("mlp", "sgd")
    compiled = compile(step)
    first = model[0].register_forward_hook(double)
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    compiled(model, optim, torch.randn(6, 8))
    compiled(model, optim, torch.randn(6, 8))
    assert len(compiled.programs) == 1
    first.remove()
    model[0].register_forward_hook(double)
    compiled(model, optim, torch.randn(6, 8))
    assert len(compiled.programs) == 2


def test_batch_size():
    check_recaptured(
        nothing,
        "args[2]: input float32[6, 8] strides [8, 1] on cpu without gradient -> "
        "input float32[4, 8]",
        torch.randn(4, 8),
    )


def test_constant_argument():
    check_recaptured(nothing, "flag: absent -> ('bool', True)", flag=True)


def test_train_and_eval():
    check_recaptured(lambda m, o: m.eval(), "Sequential.1: ", model="drop")


def test_an_attribute_of_a_module():
    def change(model, optim):
        model[1].p = 0.9

    check_recaptured(change, "('p', 0.9)", model="drop")


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.activation = torch.relu
        self.scales = [1.0, 2.0]

    def forward(self, x):
        return self.activation(self.linear(x)) * sum(self.scales)


@pytest.mark.parametrize(
    ("name", "value"), [("activation", torch.tanh), ("scales", [1.0, 3.0])]
)
def test_functions_and_lists_of_a_module(name, value):
    model = Chosen()
    optim = torch.optim.SGD(model.parameters(), lr=0.0)
    compiled = compile(step)
    batch = torch.randn(6, 8)
    compiled(model, optim, batch)
    if name == "scales":
        model.scales[:] = value
    else:
        setattr(model, name, value)
    assert torch.equal(
        compiled(model, optim, batch), step(model, optim, batch).detach()
    )
    assert len(compiled.programs) == 2


def test_requires_grad():
    def change(model, optim):
        model[0].weight.requires_grad_(False)

    check_recaptured(change, "Sequential.0.weight: parameter float32[8, 8]")


def test_a_parameter_that_its_optimizer_does_not_know():
    def change(model, optim):
        model[2].weight = nn.Parameter(torch.ones(4, 8))

    check_recaptured(change, "SGD.group0.params[2]: absent -> parameter float32[4, 8]")


def test_weights_tied_after_the_first_call():
    torch.manual_seed(0)
    pairs = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        nn.init.ones_(model[0].weight)
        nn.init.eye_(model[1].weight)
        for layer in model:
            nn.init.zeros_(layer.bias)
        pairs.append((model, torch.optim.SGD(model.parameters(), lr=0.001)))
    compiled = compile(step)
    run_both(compiled, pairs, torch.ones(6, 8))
    for model, _ in pairs:
        model[1].weight = model[0].weight
    run_both(compiled, pairs, torch.ones(6, 8))
    assert difference(*pairs) == 0.0
    assert pairs[0][0][1].weight is pairs[0][0][0].weight
    assert "Sequential.1.weight: parameter" in compiled.programs[1].reason


def test_a_number_that_was_branched_on():
    def change(model, optim):
        optim.param_groups[0]["weight_decay"] = 0.5

    check_recaptured(change, "weight_decay", optimizer="momentum_without_decay")


def test_a_flag_of_the_optimizer():
    def change(model, optim):
        optim.param_groups[0]["maximize"] = True

    check_recaptured(change, "SGD.group0.maximize: False -> True")


def test_programs_are_kept_and_found_again():
    pairs = build("mlp", "sgd")
    compiled = compile(step)
    for size in (6, 4, 6, 4, 6):
        run_both(compiled, pairs, torch.randn(size, 8))
    assert len(compiled.programs) == 2
    assert "one program for every size of args[2] [*, 8]" in compiled.explain()
    assert difference(*pairs) == 0.0


def named_step(model, optim, batch, name):
    return step(model, optim, batch)


def test_many_programs_are_told_of():
    (model, optim), _ = build("mlp", "sgd")
    compiled = compile(named_step)
    for name in "abcdefgh":
        compiled(model, optim, torch.randn(4, 8), name)
    with pytest.warns(CaptureWarning, match="8 programs are captured") as told:
        compiled(model, optim, torch.randn(4, 8), "i")
    text = str(told[0].message)
    assert "args[3]: ('str', 'h') -> ('str', 'i')" in text
    assert "pad batches to some shapes" in text
    assert "foreach=True where a schedule changes more than its lr" in text
    assert len(compiled.programs) == 9


def test_an_optimizer_of_another_model_is_told_of():
    (model, optim), (_, others) = build("mlp", "adam")
    compiled = compile(step)
    with pytest.warns(CaptureWarning) as told:
        compiled(model, others, torch.randn(4, 8))
    assert str(told[0].message) == (
        "compile: Adam updates nothing: none of its parameters has a gradient "
        "when it steps. Pass the optimizer that was made with the parameters of the model "
        "that the step trains, and call backward() before step()."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(model, optim, torch.randn(4, 8))


def test_of_too_many_programs_the_one_unused_longest_goes(monkeypatch):
    monkeypatch.setattr("torchspmd.step.programs.MAX_PROGRAMS", 2)
    pairs = build("mlp", "sgd")
    compiled = compile(named_step)
    for name in "abaca":  # b goes when c comes
        batch = torch.randn(4, 8)
        for call, (model, optim) in zip((named_step, compiled), pairs, strict=True):
            call(model, optim, batch, name)
    assert [each.number for each in compiled.programs] == [0, 2]
    assert difference(*pairs) == 0.0


def test_what_a_compiled_step_shows():
    (model, optim), _ = build("mlp", "sgd")

    @compile
    def train(model, optim, batch):
        """The step's own docstring."""
        return step(model, optim, batch)

    assert isinstance(train, CompiledStep)
    assert train.__doc__ == "The step's own docstring."
    assert train.programs == ()
    for _ in range(3):
        train(model, optim, torch.randn(6, 8))
    (program,) = train.programs
    assert program.reason == "first call"
    assert "torch.ops.aten.addmm.default" in program.code
    assert program.capture_seconds > 0 and program.first_run_seconds > 0
    assert len(program.step_seconds) == 2
    assert "first run" in train.explain() and ", step " in train.explain()
    assert len(program.ledger) == 0


def test_the_graph_is_functional():
    (model, optim), _ = build("norm", "adam_fused")
    compiled = compile(step)
    for _ in range(2):
        compiled(model, optim, torch.randn(6, 8))
    for program in compiled.programs:
        for node in program.graph.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                assert not node.target._schema.is_mutable, node
    names = [node.name for node in compiled.programs[0].graph.graph.nodes]
    assert "_fused_adam" in names and "_foreach_add" in names


def test_close_and_context():
    (model, optim), _ = build("mlp", "sgd")
    with compile(step) as compiled:
        compiled(model, optim, torch.randn(6, 8), last_train_step=True)
        compiled.flush()
    with pytest.raises(UsageError, match="this compiled step was closed"):
        compiled(model, optim, torch.randn(6, 8))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "triton"}, "choose among graph, inductor"),
        ({"verify": "yes"}, "pass True, False or a Verification"),
        ({"parallel_mode": "ddp"}, "pass a DataParallel"),
    ],
)
def test_arguments_that_are_refused(options, text):
    (model, optim), _ = build("mlp", "sgd")
    with pytest.raises(UsageError, match=text):
        compile(**options)(step)(model, optim, torch.randn(6, 8))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("zero",), "Unknown parallel style: 'zero'"),
        (("replicate", "max"), "choose 'avg' or 'sum'"),
    ],
)
def test_data_parallel_arguments(arguments, text):
    with pytest.raises(UsageError, match=text):
        DataParallel(*arguments)


def test_data_parallel_needs_a_group():
    (model, optim), _ = build("mlp", "sgd")
    compiled = compile(parallel_mode=DataParallel())(step)
    with pytest.raises(SpmdError, match="there is no process group"):
        compiled(model, optim, torch.randn(6, 8))


def test_compile_needs_a_function():
    with pytest.raises(UsageError, match="int cannot be called"):
        compile()(3)
