"""Hooks of modules, parameters and optimizers in a compiled step on one device."""

import copy
import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from training import train_keeping_gradients as step

from torchspmd.errors import CaptureError
from torchspmd.step import compile


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def follow(change, function=step):
    """Three steps, the change, two steps; compiled and eager, with the same bits."""
    compiled, (model, optim), (other, other_optim) = compile(function), build(), build()
    for number in range(5):
        if number == 3:  # the third call took the quick look
            before = [p.detach().clone() for p in model.parameters()]
            change(model, optim)
            change(other, other_optim)
        batch = torch.randn(3, 4)
        compiled(model, optim, batch)
        function(other, other_optim, batch)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    after = model.parameters()
    moved = [not torch.equal(p, q) for p, q in zip(before, after, strict=True)]
    return compiled, moved


def zero(gradient):
    return gradient * 0


def zero_sum(parameter):
    parameter.grad.zero_()


def decay(parameter):
    parameter.grad.add_(parameter.detach(), alpha=0.1)


def before_adding(model, optim):
    optim.param_groups[0]["momentum"] = 0
    model[0].weight.register_hook(zero)


def after_adding(model, optim):
    optim.param_groups[0]["momentum"] = 0
    model[0].weight.register_post_accumulate_grad_hook(zero_sum)


@pytest.mark.parametrize("change", (before_adding, after_adding))
def test_gradient_hooks_run(change):
    compiled, moved = follow(change)
    assert moved == [False, True, True, True]
    name = {before_adding: "zero", after_adding: "zero_sum"}[change]
    reason = f"gradient hooks of Sequential.0.weight: absent -> {name}"
    assert any(reason in program.reason for program in compiled.programs)


def test_they_run_in_their_order():
    def change(model, optim):
        weight = model[2].weight
        weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.02))
        weight.register_post_accumulate_grad_hook(decay)
        weight.register_hook(lambda gradient: gradient * 3)
        weight.register_hook(lambda gradient: None)

    def twice(model, optim, batch):
        optim.zero_grad()
        for each in (batch, batch * 2):
            model(each).square().mean().backward()
        (gradient,) = torch.autograd.grad(model(batch).sum(), [model[2].weight])
        model[2].weight.grad.add_(gradient)
        optim.step()

    _, moved = follow(change, twice)
    assert all(moved)


def test_gradient_hooks_that_go_and_come():
    (model, optim), compiled = build(), compile(step)
    for _ in range(2):  # with and without momentum
        compiled(model, optim, torch.randn(3, 4))
    hook = model[0].bias.register_hook(zero)
    compiled(model, optim, torch.randn(3, 4))
    assert len(compiled.programs) == 3
    hook.remove()
    compiled(model, optim, torch.randn(3, 4))
    assert len(compiled.programs) == 3
    model[0].bias.register_hook(zero)
    compiled(model, optim, torch.randn(3, 4))
    assert len(compiled.programs) == 4


def test_frozen_parameters_may_keep_their_hooks():
    def change(model, optim):
        model[0].weight.register_hook(zero)
        model[0].weight.requires_grad_(False)

    _, moved = follow(change)
    assert all(moved[1:])


def clear_gradients(optim, args, kwargs):
    for group in optim.param_groups:
        for parameter in group["params"]:
            parameter.grad.zero_()


def halve(optim, args, kwargs):
    with torch.no_grad():
        for parameter in optim.param_groups[0]["params"]:
            parameter.mul_(0.5)


def test_optimizer_hooks_added_later():
    def before(model, optim):
        optim.param_groups[0]["momentum"] = 0
        optim.register_step_pre_hook(clear_gradients)

    compiled, moved = follow(before)
    assert not any(moved)
    assert "hooks of SGD: absent -> clear_gradients" in compiled.programs[-1].reason
    compiled, _ = follow(lambda model, optim: optim.register_step_post_hook(halve))
    assert "hooks of SGD: absent -> halve" in compiled.programs[-1].reason


class Watching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.register_forward_hook(self.look)
        self.inner.weight.register_hook(self.pass_on)

    def look(self, module, args, output):
        return output * 2

    def pass_on(self, gradient):
        return gradient * 2

    def forward(self, x):
        return self.inner(x)


def test_a_hook_keeps_no_model():
    compiled, model = compile(step), Watching()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        compiled(model, optim, torch.randn(3, 4))
    assert len(compiled.programs) == 2  # without and with gradients before the step
    found = weakref.ref(model)
    del model, optim
    gc.collect()
    assert found() is None


def hooked_model(of):
    model, factors = nn.Sequential(nn.Linear(4, 4)), [2.0]
    if of == "a layer":
        model[0].register_forward_hook(lambda *args: args[2] * len(model) * factors[0])
    else:
        model[0].weight.register_hook(lambda grad: grad * len(model) * factors[0])
    return model


@pytest.mark.parametrize("of", ("a layer", "a gradient"))
def test_a_hook_that_names_its_model_does_not_keep_it(of):
    compiled, model = compile(step), hooked_model(of)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        compiled(model, optim, torch.randn(3, 4))
    found = weakref.ref(model)
    del model, optim
    gc.collect()
    assert found() is None


@dataclass
class Scale:
    """A hook without a hash."""

    factor: float = 2.0

    def __call__(self, module, args, output):
        return output * self.factor


def test_hooks_without_a_hash():
    compiled, _ = follow(lambda model, optim: model[0].register_forward_hook(Scale()))
    assert "hooks of Sequential.0: absent -> Scale" in compiled.programs[-1].reason


def test_a_copied_hook_is_another():
    """It has the same key, and may do something else."""
    (model, _), compiled = build(), compile(step)
    model[0].register_forward_hook(Scale())
    models = [model, copy.deepcopy(model)]
    (hook,) = models[1][0]._forward_hooks.values()
    hook.factor = 3.0
    for each in models:
        other, batch = copy.deepcopy(each), torch.randn(3, 4)
        compiled(each, torch.optim.SGD(each.parameters(), lr=0.1), batch)
        step(other, torch.optim.SGD(other.parameters(), lr=0.1), batch)
        pairs = zip(each.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)


def refusal(model, optim, function=step):
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(CaptureError) as caught:
        compile(function)(model, optim, torch.randn(3, 4))
    pairs = zip(before, model.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    return str(caught.value)


def test_hooks_that_wait_for_all_gradients():
    model, optim = build()
    register_multi_grad_hook(list(model[0].parameters()), lambda gradients: None)
    text = refusal(model, optim)
    assert "register_multi_grad_hook" in text and "Sequential.2" not in text
    for name in ("weight", "bias"):
        assert f"  * Sequential.0.{name}: register_multi_grad_hook." in text
    assert "Remove them, and do what they do in the step, after backward." in text


def test_hooks_with_tensors_of_their_own():
    model, optim = build()
    mask = torch.ones(5, 4)
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    text = refusal(model, optim)
    assert "uses a tensor that is in no argument" in text
    assert "lambda gradient: gradient * mask" in text
    assert "in Sequential.0 (backward)" in text


def test_optimizers_that_are_no_arguments():
    """In a hook of a parameter, or in the step itself."""
    model, _ = build()
    hidden = torch.optim.Adam([model[2].bias], lr=0.1)

    def without(model, optim, batch):
        model(batch).square().mean().backward()

    def hides(model, optim, batch):
        without(model, optim, batch)
        hidden.step()

    expected = (
        "calls step() of an optimizer (Adam) that is no argument of the step, so "
        "Sequential.2.bias would not be updated. Pass every optimizer that steps as an "
        "argument."
    )
    assert expected in refusal(model, None, hides)
    model[2].bias.register_post_accumulate_grad_hook(lambda _: hidden.step())
    assert expected in refusal(model, None, without)
    compile(without)(model, hidden, torch.randn(3, 4))
    assert hidden.state[model[2].bias]
