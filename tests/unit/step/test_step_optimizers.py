"""Optimizers that choose by their counters, and those that cannot be captured."""

import copy

import numpy as np
import pytest
import torch
from step_models import build, difference
from torch import nn
from training import train

from torchspmd.errors import CaptureError
from torchspmd.step import compile
from torchspmd.step.graph.optimizer_lists import get_all_fused_optimizer_blocks


def follow(step, ours, reference, steps):
    for number in range(steps):
        torch.manual_seed(number)
        batch = torch.randn(6, 8)
        got, expected = step(*ours, batch), train(*reference, batch)
        assert torch.equal(got, expected.detach())
    assert difference(ours, reference) == 0.0


# Ten steps from cold: one program makes the state, the others differ by what is chosen.
PROGRAMS = {
    "sgd_fused": 1,
    "momentum_fused": 1,
    "radam": 2,
    "radam_foreach": 2,
    "asgd": 2,
    "asgd_foreach": 1,
    "adafactor": 1,
    "adafactor_foreach": 1,
}


@pytest.mark.parametrize("optimizer", PROGRAMS)
def test_ten_steps_need_few_programs(optimizer):
    ours, reference = build("mlp", optimizer)
    step = compile(train)
    follow(step, ours, reference, 10)
    assert len(step.programs) == PROGRAMS[optimizer]


@pytest.fixture(scope="module")
def radam_step():
    """With its two programs, from eight steps of another model."""
    step = compile(train)
    follow(step, *build("mlp", "radam"), 8)
    return step


def test_the_reason_names_the_counter(radam_step):
    step = radam_step
    assert "RAdam.step" in step.programs[1].reason
    assert step.programs[1].reason.startswith("differs from program 0:\nnot ")


def test_a_loaded_counter_finds_its_program(radam_step):
    (model, optim), (other, other_optim) = build("mlp", "radam")
    step = radam_step
    saved = None
    for number in range(8):
        batch = torch.randn(6, 8)
        step(model, optim, batch)
        train(other, other_optim, batch)
        saved = saved or (number == 1 and copy.deepcopy(optim.state_dict()))
    for each in (optim, other_optim):  # back to the second step
        each.load_state_dict(copy.deepcopy(saved))
    follow(step, (model, optim), (other, other_optim), 8)
    assert len(step.programs) == 2


def test_counters_that_are_not_equal():
    (model, optim), (other, other_optim) = build("mlp", "radam")
    step = compile(train)
    follow(step, (model, optim), (other, other_optim), 2)
    for each in (optim, other_optim):
        next(iter(each.state.values()))["step"].fill_(9.0)
    follow(step, (model, optim), (other, other_optim), 2)
    assert "not RAdam.step equal everywhere" in step.programs[1].reason


def test_each_update_reads_its_own_counter():
    ours, reference = build("mlp", "radam")
    step = compile(train)
    follow(step, ours, reference, 2)
    graph = step.programs[0].graph.graph
    reads = graph.find_nodes(
        op="call_function", target=torch.ops.aten._local_scalar_dense.default
    )
    sources = {node.args[0] for node in reads if node.users}
    assert len(sources) == len(list(ours[0].parameters()))


class Careful(torch.optim.Optimizer):
    """Takes smaller steps by the norm of a gradient: a choice by computed values."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad.norm().item() > 1:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


def refusal(optim, model, step=train):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError) as caught:
        compile(step)(model, optim, torch.randn(6, 8))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    return str(caught.value)


def test_a_choice_by_gradients_is_refused():
    model = nn.Linear(8, 2)
    text = refusal(Careful(model.parameters()), model)
    assert "Careful chooses what to do by a value that is not known yet" in text
    assert "if parameter.grad.norm().item() > 1:" in text
    assert "capturable=True" in text and "torch.where" in text


def test_lbfgs_is_refused_by_name():
    model = nn.Linear(8, 2)
    optim = torch.optim.LBFGS(model.parameters())

    def step(model, optim, batch):
        return optim.step(lambda: model(batch).square().mean())

    text = refusal(optim, model, step)
    assert "argument args[1] is LBFGS, which calls its closure as often as" in text
    assert "call optim.step(closure) yourself" in text


def test_the_way_out_for_lbfgs():
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    other = copy.deepcopy(model)
    batch = torch.randn(6, 8)

    def closure(model, batch):
        model.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    compiled = compile(closure)
    for each, run in ((model, compiled), (other, closure)):
        optim = torch.optim.LBFGS(each.parameters(), max_iter=5)
        for _ in range(2):
            optim.step(lambda each=each, run=run: run(each, batch))
    assert torch.equal(model.weight, other.weight)


def test_sparse_adam_is_refused_by_name():
    model = nn.Embedding(4, 2, sparse=True)
    text = refusal(torch.optim.SparseAdam(model.parameters()), model)
    assert "is SparseAdam, which works on sparse gradients" in text
    assert "sparse=False and use Adam" in text


def scaled(model, optim, batch, scaler):
    scaler.scale(model(batch).square().mean()).backward()
    scaler.step(optim)
    scaler.update()
    optim.zero_grad()


def test_a_first_fused_step_that_may_be_skipped():
    model = nn.Linear(8, 2)
    optim = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, dampening=0.1, fused=True
    )
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(
        CaptureError, match=r"the first step of SGD\(fused=True\) makes"
    ):
        compile(scaled)(model, optim, torch.randn(6, 8), scaler)


@pytest.mark.parametrize(
    ("optimizer", "skipped"),
    # Eager's fused SGD leaves its momentum without values where it skips the first step.
    [("momentum_fused", 2), ("radam", 0), ("radam", 2), ("adafactor", 0)],
)
def test_scaled_losses_with_a_skipped_step(optimizer, skipped):
    ours, reference = build("mlp", optimizer)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    step = compile(scaled)
    for number in range(4):
        batch = torch.randn(6, 8)
        if number == skipped:
            batch[0, 0] = torch.inf
        step(*ours, batch, scalers[0])
        scaled(*reference, batch, scalers[1])
    assert difference(ours, reference) == 0.0
    assert scalers[0].get_scale() == scalers[1].get_scale() == 32.0


def test_a_fused_optimizer_is_found_in_the_graph():
    ours, reference = build("mlp", "momentum_fused")
    step = compile(train)
    follow(step, ours, reference, 2)
    for program in step.programs:
        (block,) = get_all_fused_optimizer_blocks(program.graph, "_fused_sgd")
        assert block.step.add_node is None
    assert "8 computed in place" in str(step.programs[0].in_place)


# ----------------------------------------------------------------------------
# State that is neither a tensor nor a number: guarded by value, or refused.


class ByRule(torch.optim.Optimizer):
    """Updates each parameter by a rule that gets its state."""

    def __init__(self, params, rule):
        super().__init__(params, {"lr": 0.1})
        self.rule = rule

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.rule(p, self.state[p], group["lr"])


def by_flag(p, state, lr):
    p.sub_(p.grad, alpha=lr * (10 if state.get("first", True) else 1))
    state["first"] = False


def by_name(p, state, lr):
    p.sub_(p.grad, alpha=lr * (3 if state.get("mode") == "late" else 1))
    state["mode"] = "late"


def by_shape(p, state, lr):
    p.sub_(p.grad, alpha=lr / len(state.get("shape", "once")))
    state["shape"] = tuple(p.shape)


def by_last_rate(p, state, lr):
    p.sub_(p.grad, alpha=lr + state.get("last", 0.0))
    state["last"] = lr


def in_dict(p, state, lr):
    state.setdefault("both", {"m": torch.zeros_like(p)})["m"].add_(p.grad)


def in_list(p, state, lr):
    state.setdefault("both", [torch.zeros_like(p)])[0].add_(p.grad)


def in_history(p, state, lr):
    state.setdefault("both", []).append(1)


def in_numpy(p, state, lr):
    state["both"] = state.get("both", np.int64(0)) + 1


def trained_by(rule, step, calls=4, state=None):
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False)
    optim = ByRule(model.parameters(), rule)
    if state is not None:
        optim.state[model.weight]["both"] = state
    losses = []
    for call in range(calls):
        optim.param_groups[0]["lr"] = 0.1 / (call + 1)
        losses.append(step(model, optim, torch.ones(3, 4)).item())
    return losses, list(optim.state[model.weight].items())


@pytest.mark.parametrize("rule", [by_flag, by_name, by_shape, by_last_rate])
def test_plain_state_is_kept_and_guarded(rule):
    step = compile(train)
    assert trained_by(rule, step) == trained_by(rule, train)
    assert len(step.programs) == 2


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (in_dict, "a dict of Tensor"),
        (in_list, "a list of Tensor"),
        (in_history, "a list of int"),
        (in_numpy, "a int64"),
    ],
)
@pytest.mark.parametrize("is_warm", [False, True])
def test_other_state_is_refused(rule, kind, is_warm):
    state = None
    if is_warm:
        ((_, state),) = trained_by(rule, train, calls=1)[1]
    with pytest.raises(CaptureError) as error:
        trained_by(rule, compile(train), state=state)
    text = str(error.value).replace("Parameter", "Tensor")
    assert f"keeps Linear.weight.both as {kind}" in text.replace("FakeTensor", "Tensor")
    assert "Keep every tensor under a key of its own" in text


def test_state_that_a_step_removes_is_refused():
    def rule(p, state, lr):
        state.pop("both", None)

    with pytest.raises(CaptureError, match=r"removes Linear\.weight\.both"):
        trained_by(rule, compile(train), state=torch.ones(2))
