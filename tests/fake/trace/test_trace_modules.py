"""Which module a communication is attributed to.

Upstream's CommDebugMode (torch 2.13) fails most of these: its forward hook is registered
anew on every call of a module and only the last handle is kept per name, so a second call
pops an empty list.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.utils.checkpoint import checkpoint

from torchspmd import CommDebugMode, Phase
from torchspmd.testing import fake_mesh


class Reduces(nn.Module):
    """Scales its input and reduces it, in forward and, differently, in backward."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return _Reduce.apply(x * self.scale)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Reduces()
        self.second = Reduces()

    def forward(self, x):
        return self.second(self.first(x))


class Stack(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def mesh():
    with fake_mesh(4, ("dp",)) as mesh:
        yield mesh


def places(mode, phase):
    return [event.module for event in mode.ledger.events if event.phase is phase]


def test_forward_and_backward_go_to_the_same_modules():
    model = Stack()
    with CommDebugMode() as mode:
        model(torch.ones(4)).sum().backward()
    order = [f"Stack.layers.{i}.{name}" for i in (0, 1) for name in ("first", "second")]
    assert places(mode, Phase.FORWARD) == order
    assert places(mode, Phase.BACKWARD) == order[::-1]


def test_module_called_twice():
    """Upstream: IndexError in the second call, and again after the mode has exited."""
    layer = Reduces()
    with pytest.raises(IndexError), TorchCommDebugMode():
        layer(layer(torch.ones(4)))

    layer = Reduces()
    with CommDebugMode() as mode:
        layer(layer(torch.ones(4))).sum().backward()
    assert places(mode, Phase.FORWARD) == ["Reduces"] * 2
    assert places(mode, Phase.BACKWARD) == ["Reduces"] * 2
    layer(torch.ones(4))


def test_several_steps_in_one_context():
    """Upstream: IndexError at the second step."""
    model = Pair()
    with CommDebugMode() as mode:
        for _ in range(3):
            model(torch.ones(4)).sum().backward()
    assert mode.ledger.total(module="Pair.first").count == 6
    assert mode.ledger.total(module="Pair.second", phase="backward").count == 3
    assert set(mode.modules) == {"Pair", "Pair.first", "Pair.second"}


def test_shared_module_counts_where_it_was_called():
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Pair(), Pair()
            self.b.second = self.a.second

        def forward(self, x):
            return self.b(self.a(x))

    with CommDebugMode() as mode:
        Shares()(torch.ones(4)).sum().backward()
    for phase in ("forward", "backward"):
        assert mode.ledger.total(module="Shares.a", phase=phase).count == 2
        assert mode.ledger.total(module="Shares.b", phase=phase).count == 2
        assert mode.ledger.total(module="Shares.b.second", phase=phase).count == 1


def test_module_that_raises_leaves_nothing_behind():
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Reduces()

        def forward(self, x):
            self.inner(x)
            raise ValueError("from the model")

    plain_call, model, layer = nn.Module.__call__, Raises(), Reduces()
    with CommDebugMode() as mode:
        with pytest.raises(ValueError, match="from the model"):
            model(torch.ones(4))
        layer(torch.ones(4))
        dist.all_reduce(torch.ones(4))
    assert places(mode, Phase.FORWARD) == ["Raises.inner", "Reduces", "Global"]
    with pytest.raises(ValueError, match="from the model"), CommDebugMode():
        model(torch.ones(4))
    assert nn.Module.__call__ is plain_call
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not model.inner._forward_hooks


def test_keyboard_interrupt_does_not_unbalance_the_stack():
    class Interrupted(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    with CommDebugMode() as mode:
        with pytest.raises(KeyboardInterrupt):
            Interrupted()(torch.ones(4))
        dist.all_reduce(torch.ones(4))
    assert places(mode, Phase.FORWARD) == ["Global"]


def test_nested_contexts_both_record():
    model = Pair()
    with CommDebugMode() as outer:
        model(torch.ones(4))
        with CommDebugMode() as inner:
            model(torch.ones(4)).sum().backward()
        model(torch.ones(4))
    assert (len(outer.ledger), len(inner.ledger)) == (8, 4)
    assert outer.ledger.total_by("module") == {
        ("Pair.first",): outer.ledger.total(module="Pair.first"),
        ("Pair.second",): outer.ledger.total(module="Pair.second"),
    }


def test_contexts_that_end_in_the_wrong_order():
    plain_call = nn.Module.__call__
    first, second = CommDebugMode(), CommDebugMode()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    Pair()(torch.ones(4))
    second.__exit__(None, None, None)
    Pair()(torch.ones(4))
    assert (len(first.ledger), len(second.ledger)) == (0, 2)
    assert nn.Module.__call__ is plain_call


def test_two_roots_of_one_class_have_two_names():
    a, b = Reduces(), Reduces()
    with CommDebugMode() as mode:
        a(torch.ones(4))
        b(torch.ones(4))
        a(torch.ones(4))
    assert places(mode, Phase.FORWARD) == ["Reduces", "Reduces#2", "Reduces"]


def test_module_outside_its_callers_tree():
    helper = Reduces()

    class Borrows(nn.Module):
        def forward(self, x):
            return helper(x)

    with CommDebugMode() as mode:
        Borrows()(torch.ones(4))
    assert places(mode, Phase.FORWARD) == ["Borrows.<Reduces>"]
    assert mode.ledger.total(module="Borrows").count == 1


def test_own_forward_hooks_belong_to_the_module():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[0].register_forward_pre_hook(lambda *_: dist.all_reduce(torch.ones(4)))
    model[1].register_forward_hook(lambda *_: dist.all_reduce(torch.ones(4)))
    with CommDebugMode() as mode:
        model(torch.ones(4))
    assert places(mode, Phase.FORWARD) == ["Sequential.0", "Sequential.1"]


@pytest.mark.parametrize(
    ("register", "module"),
    [
        (lambda m: m.first.register_full_backward_hook, "Pair.first"),
        (lambda m: m.second.register_full_backward_pre_hook, "Pair.second"),
        (lambda m: m.first.scale.register_hook, "Pair.first"),
        (lambda m: m.second.scale.register_post_accumulate_grad_hook, "Pair.second"),
    ],
    ids=["full backward", "full backward pre", "tensor", "post accumulate"],
)
def test_backward_hooks_belong_to_their_module(register, module):
    model = Pair()

    def hook(*_):
        dist.broadcast(torch.ones(1), 0)

    register(model)(hook)
    with CommDebugMode() as mode:
        model(torch.ones(4, requires_grad=True)).sum().backward()
    events = [event for event in mode.ledger.events if event.kind == "broadcast"]
    assert [(event.module, event.phase) for event in events] == [
        (module, Phase.BACKWARD)
    ]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_a_phase_of_its_own(reentrant):
    """Upstream counts the communication of a recomputation as backward."""
    model = Pair()
    with CommDebugMode() as mode:
        x = torch.ones(4, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert mode.ledger.total(phase="forward").count == 2
    assert mode.ledger.total(phase="backward").count == 2
    # Without reentry, recomputation stops as soon as all saved tensors are there.
    assert mode.ledger.total(phase="recompute").count == (2 if reentrant else 1)
    assert set(mode.ledger.total_by("module")) == {("Pair.first",), ("Pair.second",)}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_modules_keep_their_paths(reentrant):
    class Checkpointed(Stack):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model = Checkpointed()
    with CommDebugMode() as mode:
        model(torch.ones(4, requires_grad=True)).sum().backward()
    firsts = [f"Checkpointed.layers.{i}.first" for i in (1, 0)]
    assert [p for p in places(mode, Phase.RECOMPUTE) if p.endswith("first")] == firsts
    assert [p for p in places(mode, Phase.BACKWARD) if p.endswith("first")] == firsts
    assert not [p for (p,) in mode.ledger.total_by("module") if p.count(".") != 3]


def test_gradient_accumulation_and_interleaved_graphs():
    a, b = Pair(), Stack(1)
    with CommDebugMode() as mode:
        losses = [
            a(torch.ones(4)).sum(),
            b(torch.ones(4)).sum(),
            a(torch.ones(4)).sum(),
        ]
        for loss in losses:
            loss.backward()
    assert mode.ledger.total(module="Pair", phase="backward").count == 4
    assert mode.ledger.total(module="Stack", phase="backward").count == 2


def test_backward_of_a_forward_before_the_context():
    loss = Pair()(torch.ones(4)).sum()
    with CommDebugMode() as mode:
        loss.backward()
    assert places(mode, Phase.BACKWARD) == ["Global", "Global"]


def test_model_can_be_deleted_while_recording():
    with CommDebugMode() as mode:
        for _ in range(50):
            Pair()(torch.ones(4))
    assert set(mode.modules) == {"Pair", "Pair.first", "Pair.second"}
    assert mode.get_parameter_info() == {}
