"""Pending updates are made as in their step, whatever stands around who asks for them."""

import copy
import threading
import warnings

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from training import train, train_keeping_gradients

from torchspmd.errors import PassWarning
from torchspmd.step import DataParallel, GraphModuleTransformation, compile
from torchspmd.testing import fake_world

WIDTH = 8


class Products(torch.optim.Optimizer):
    """Multiplies gradients by a matrix; noisy, if told."""

    def __init__(self, params, noise=0.0):
        super().__init__(params, {"noise": noise})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                change = p.grad @ torch.ones(p.shape[-1], p.shape[-1]) / 7
                if group["noise"]:
                    change = change + group["noise"] * torch.randn_like(p.grad)
                p.sub_(0.1 * change)


class Training:
    """A step whose updates are left for the next one; in a world of two ranks."""

    def __init__(self, optimizer=Products, step=train, **options):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
        self.model = nn.Sequential(*layers)
        self.held = [layer.weight for layer in layers]
        self.optim = optimizer(self.model.parameters(), **options)
        self.transformation = GraphModuleTransformation(
            enable_graph_optimization=True, overlap_iterations=True, bucket_size_mb=1e-4
        )
        self.step = compile(
            gm_transformation=self.transformation,
            parallel_mode=DataParallel("replicate"),
        )(step)
        self.batch = torch.randn(4, WIDTH)

    def run(self, steps=2):
        for _ in range(steps):
            loss = self.step(self.model, self.optim, self.batch)
        return loss

    @property
    def is_pending(self):
        return any(program.is_pending for program in self.step.programs)

    def weights(self):
        """As they are, without a look that would flush."""
        return [weight.detach().clone() for weight in self.held]


@pytest.fixture(autouse=True)
def world():
    with fake_world(2):
        yield


def under_autocast(training):
    with torch.autocast("cpu", torch.bfloat16):
        training.model(training.batch)


def in_inference_mode(training):
    with torch.inference_mode():
        training.model(training.batch)


def with_fake_tensors(training):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        training.model(mode.from_tensor(training.batch))


def state_dict_with_fake_tensors(training):
    with FakeTensorMode(allow_non_fake_inputs=True):
        training.model.state_dict()


def while_it_is_recorded(training):
    graph = make_fx(training.model)(training.batch)
    assert not [node for node in graph.graph.nodes if "sub" in node.name]


def parameters_of_a_parent(training):
    parent = nn.ModuleDict({"child": training.model})
    list(parent.parameters())


def state_dict_of_a_parent(training):
    nn.ModuleDict({"child": training.model}).state_dict()


def by_torch_jit(training):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(training.model, training.batch, check_trace=False)
    before = training.weights()
    traced(training.batch)
    assert all(map(torch.equal, before, training.weights()))


def by_torch_export(training):
    program = torch.export.export(training.model, (training.batch,))
    assert not [node for node in program.graph.nodes if "sub" in node.name]


def a_parameter_alone(training):
    (taken, *_) = (layer.weight for layer in training.model)
    assert taken is training.held[0]


def a_table_of_parameters(training):
    list(training.model[1]._parameters.values())


def while_it_is_traced(training):
    fx.symbolic_trace(nn.Sequential(training.model))


@pytest.mark.parametrize(
    "look",
    [
        under_autocast,
        in_inference_mode,
        with_fake_tensors,
        state_dict_with_fake_tensors,
        while_it_is_recorded,
        while_it_is_traced,
        by_torch_jit,
        by_torch_export,
        a_parameter_alone,
        a_table_of_parameters,
        parameters_of_a_parent,
        state_dict_of_a_parent,
    ],
)
def test_a_look_makes_the_update_of_the_step(look):
    plain, looked_at = Training(), Training()
    for each in (plain, looked_at):
        each.run(3)
        assert each.is_pending
    before = looked_at.weights()
    plain.step.flush()
    look(looked_at)
    assert not looked_at.is_pending
    for was, now, expected in zip(
        before, looked_at.weights(), plain.weights(), strict=True
    ):
        assert not torch.equal(was, now)
        assert torch.equal(now, expected)


def test_what_a_parent_loads_stays():
    training = Training()
    training.run(3)
    parent = nn.ModuleDict({"child": training.model})
    zeros = {name: torch.zeros(WIDTH, WIDTH) for name in parent.state_dict()}
    training.run(1)
    assert training.is_pending
    parent.load_state_dict(zeros)
    training.step.flush()
    assert not torch.cat(training.weights()).any()


def test_gradients_that_are_left_can_be_written():
    training = Training(step=train_keeping_gradients)
    training.run(3)
    in_inference_mode(training)
    for parameter in training.model.parameters():
        parameter.grad.mul_(2)  # no inference tensor


def test_an_update_that_draws_random_numbers_is_not_left():
    training = Training(noise=0.1)
    with pytest.warns(PassWarning, match="randn_like_2 draws random numbers"):
        training.run(2)
    assert not training.is_pending
    refused = training.step.programs[-1].certificate.passes[-1].outcome.refused
    assert "draws random numbers (optimizer of" in refused[0]
    assert "in the next iteration it would draw others" in refused[0]


def trained_by(teacher):
    """A step that learns from a teacher which it does not train."""

    def step(model, optim, batch, teacher):
        loss = (model(batch) - teacher(batch)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss

    training = Training(step=step)

    def run(steps=1):
        for _ in range(steps):
            training.step(training.model, training.optim, training.batch, teacher)

    training.run = run
    return training


def test_steps_that_share_a_teacher():
    teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    untouched = set(vars(teacher))
    one, other = trained_by(teacher), trained_by(teacher)
    for each in (one, other):
        each.run(3)  # the second is captured while the first one has pending
    one.run(2)
    for _ in range(3):
        assert one.is_pending and other.is_pending
        one.step.flush()
        other.step.flush()
        assert set(vars(teacher)) == untouched
        assert not teacher._forward_pre_hooks
        copy.deepcopy(teacher)
        for each in (one, other):
            each.run(2)
    one.step.flush()
    other.model.state_dict()
    assert set(vars(teacher)) == untouched


def test_a_method_of_the_users_own_is_put_back_from_below():
    training = Training()
    training.run(3)

    def forward(batch):
        return nn.Sequential.forward(training.model, batch)

    training.step.flush()
    training.model.forward = forward
    training.run(3)
    other = Training()
    other.model = training.model
    other.optim = Products(training.model.parameters())
    other.run(3)
    training.step.flush()
    other.step.flush()
    assert vars(training.model)["forward"] is forward


def test_another_thread_waits_for_the_step():
    training = Training()
    training.run(3)
    saved = []
    look = threading.Thread(target=lambda: saved.append(training.model.state_dict()))
    with training.step._lock:  # as it is held during a step
        look.start()
        look.join(0.2)
        assert not saved and training.is_pending
    look.join(10)
    assert saved and not training.is_pending


def test_train_of_a_model_that_trains_leaves_the_updates():
    training = Training()
    training.run(3)
    training.model.train()
    assert training.is_pending
    training.model.eval()
    assert not training.is_pending


def test_looks_before_every_step_are_told():
    training = Training()
    training.run(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            training.run(1)
            list(training.model.parameters())
    training.run(1)
    with pytest.warns(
        PassWarning, match=r"little or nothing overlaps\. Again and again"
    ):
        list(training.model.parameters())
    training.run(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        list(training.model.parameters())
