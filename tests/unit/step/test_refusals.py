"""Steps that cannot be captured: the user's line, and the way out."""

from dataclasses import dataclass

import pytest
import torch
from step_models import build
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import train_sum as plain

from torchspmd.errors import CaptureError
from torchspmd.step import IterGraphModule, compile


def refusal(step, *extra, model="mlp", optimizer="sgd"):
    """The text of the refusal; the user's objects are as before."""
    (module, optim), _ = build(model, optimizer)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    groups = [dict(group) for group in optim.param_groups]
    with pytest.raises(CaptureError) as caught:
        compile(step)(module, optim, torch.randn(6, 8), *extra)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert [dict(group) for group in optim.param_groups] == groups
    assert all(type(p) is nn.Parameter for p in module.parameters())
    # A step that fits still runs: nothing was left behind.
    compile(plain)(module, optim, torch.randn(6, 8))
    return str(caught.value)


def test_item():
    def step(model, optim, batch):
        loss = model(batch).sum()
        loss.backward()
        return loss.item()

    text = refusal(step)
    assert "the step needs a tensor's value" in text
    assert "test_refusals.py" in text and "return loss.item()" in text
    assert "Return the tensor and read it after the step" in text


def test_branch_on_a_value():
    def step(model, optim, batch):
        if model(batch).sum() > 0:
            plain(model, optim, batch)

    text = refusal(step)
    assert "if model(batch).sum() > 0:" in text and "torch.where" in text


def test_shape_that_depends_on_values():
    def step(model, optim, batch):
        return model(batch[batch[:, 0] > 0]).sum()

    text = refusal(step)
    assert "the size of what aten.nonzero.default makes depends on values" in text
    assert "F.one_hot(x, n).sum(0) instead of bincount()" in text


def test_distributions_that_look_at_values():
    def step(model, optim, batch, *, check=True):
        drawn = torch.distributions.Normal(model(batch), 1.0, validate_args=check)
        drawn.rsample().square().mean().backward()
        return drawn.log_prob(batch[:, :1]).sum().detach()

    text = refusal(step)
    assert "a distribution checks the values of its arguments" in text
    assert "validate_args=False" in text
    model = nn.Linear(8, 1)
    compile(step)(model, None, torch.randn(6, 8), check=False)


def test_print():
    def step(model, optim, batch):
        print(model(batch))

    text = refusal(step)
    assert "the step prints a tensor" in text and "test_refusals.py" in text


def test_tensor_from_elsewhere():
    weights = torch.ones(4, requires_grad=True)

    def step(model, optim, batch):
        return (model(batch) * weights).sum()

    text = refusal(step)
    assert "a tensor that is in no argument" in text
    assert "return (model(batch) * weights).sum()" in text
    assert "register it as a buffer" in text


def test_error_of_the_step_itself():
    def step(model, optim, batch):
        return model(batch[:, :3])

    text = refusal(step)
    assert "failed while it was captured (RuntimeError: " in text
    assert "return model(batch[:, :3])" in text and "Sequential.0 (forward)" in text


class NoBatchError(Exception):
    pass


def test_an_error_that_the_step_raises_first_is_its_own():
    def step(model, optim, batch):
        if len(batch) < 2:
            raise NoBatchError("no batch")
        plain(model, optim, batch)
        return model(batch).detach()

    (model, optim), (other, reference) = build("mlp", "sgd")
    compiled = compile(step)
    x = torch.randn(6, 8)
    with pytest.raises(NoBatchError, match="no batch") as caught:
        compiled(model, optim, x[:1])
    assert caught.value.__notes__ == [
        f"{step.__qualname__} was not captured: it raises this itself, before it does "
        "anything."
    ]
    assert torch.equal(compiled(model, optim, x), step(other, reference, x))
    with pytest.raises(NoBatchError):
        compiled(model, optim, x[:1])


def forward_first(model, optim, batch):
    model(batch)


def count_first(model, optim, batch):
    model.count = 3


def backward_first(model, optim, batch):
    model(batch).sum().backward()


@pytest.mark.parametrize("begin", [forward_first, count_first, backward_first])
def test_an_error_that_the_step_raises_later(begin):
    def step(model, optim, batch):
        begin(model, optim, batch)
        raise NoBatchError("no batch")

    text = refusal(step)
    assert "the step raises NoBatchError: no batch, after it has begun" in text
    assert "Check before the first operation on tensors in the step" in text
    assert 'raise NoBatchError("no batch")' in text


def test_gradients_cleared_before_an_error():
    def step(model, optim, batch):
        optim.zero_grad()
        raise NoBatchError

    (model, optim), _ = build("mlp", "sgd")
    model(torch.randn(6, 8)).sum().backward()
    with pytest.raises(CaptureError, match="after it has begun"):
        compile(step)(model, optim, torch.randn(6, 8))
    assert model[0].weight.grad is not None


def test_argument_that_changes_without_a_sign():
    text = refusal(lambda model, optim, batch, extra: None, bytearray(1 << 17))
    assert "argument args[3] is a bytearray" in text


def test_a_step_that_calls_a_compiled_step():
    inner = compile(plain)

    def outer(model, optim, batch):
        return inner(model, optim, batch)

    model = nn.Linear(8, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError) as caught:
        compile(outer)(model, optim, torch.randn(6, 8))
    text = str(caught.value)
    assert "a step that is captured calls train_sum, which is a compiled step" in text
    assert "return inner(model, optim, batch)" in text
    assert "train_sum.__wrapped__" in text
    inner(model, optim, torch.randn(6, 8))


def test_batch_norm_without_momentum():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match="a batch norm with momentum=None averages"):
        compile(plain)(model, optim, torch.randn(6, 8))


def test_a_gradient_of_another_shape_than_its_parameter():
    model = nn.Sequential(nn.Embedding(4, 8))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([1])).sum().backward()
    model[0].weight.data = torch.ones(5, 8)
    with pytest.raises(CaptureError) as caught:
        compile(plain)(model, optim, torch.tensor([1]))
    text = str(caught.value)
    assert "Sequential.0.weight.grad is of shape [4, 8], and its parameter" in text
    assert "Call zero_grad() before the step." in text
    model.zero_grad()
    compile(plain)(model, optim, torch.tensor([1]))


def test_packed_sequences():
    def step(model, optim, batch):
        loss = model(batch)[0].data.sum()
        loss.backward()
        optim.step()

    model = nn.GRU(8, 4, batch_first=True)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths = torch.tensor([3, 2])
    batch = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 3, 8), lengths, True)
    with pytest.raises(CaptureError, match="a packed sequence has sizes that depend"):
        compile(step)(model, optim, batch)


def test_input_that_requires_gradients():
    extra = torch.ones(2, requires_grad=True)
    text = refusal(lambda model, optim, batch, extra: None, extra)
    assert "argument args[3] requires gradients" in text


def test_weights_tied_by_memory():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match="two tensors on the same memory"):
        compile(plain)(model, optim, torch.randn(6, 8))


def test_random_numbers_in_a_checkpointed_region():
    def step(model, optim, batch):
        loss = checkpoint(
            model, batch, use_reentrant=False, preserve_rng_state=False
        ).sum()
        loss.backward()

    text = refusal(step, model="drop")
    assert "Sequential.1 draws random numbers in backward" in text
    assert "preserve_rng_state=True" in text


def test_buffer_replaced_by_another_shape():
    def step(model, optim, batch):
        model[1].running_mean = torch.zeros(3)
        return batch.sum()

    text = refusal(step, model="norm")
    assert "replaces Sequential.1.running_mean by a tensor of another shape" in text


def test_no_grad():
    (model, optim), _ = build("mlp", "sgd")
    with torch.no_grad(), pytest.raises(CaptureError, match="gradients are disabled"):
        compile(plain)(model, optim, torch.randn(6, 8))


def test_ddp(monkeypatch):
    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self):
            nn.Module.__init__(self)

    with pytest.raises(CaptureError, match=r"is wrapped by Wrapped, which reduces"):
        compile(plain)(Wrapped(), None, torch.randn(6, 8))


def test_tensor_inside_a_tuple_of_hyper_parameters():
    (model, _), _ = build("mlp", "sgd")
    optim = torch.optim.Adam(model.parameters())
    optim.param_groups[0]["betas"] = (torch.tensor(0.9), 0.99)
    with pytest.raises(CaptureError, match=r"betas\[0\] is a tensor inside a tuple"):
        compile(plain)(model, optim, torch.randn(6, 8))


def test_state_under_another_key():
    (model, optim), _ = build("mlp", "sgd")
    optim.state["global"] = {"count": 1}
    with pytest.raises(CaptureError, match="keeps state under str"):
        compile(plain)(model, optim, torch.randn(6, 8))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam])
@pytest.mark.parametrize("foreach", [False, True])
def test_inductor_with_a_counter_on_the_host(kind, foreach):
    (model, _), _ = build("mlp", "sgd")
    optim = kind(model.parameters(), foreach=foreach)
    with pytest.raises(CaptureError, match="reads its step counter on the host"):
        compile(backend="inductor")(plain)(model, optim, torch.randn(6, 8))


def test_transformation_that_returns_nothing():
    (model, optim), _ = build("mlp", "sgd")
    with pytest.raises(CaptureError, match="gm_transformation returned NoneType"):
        compile(gm_transformation=lambda gm: None)(plain)(
            model, optim, torch.randn(6, 8)
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_graph_without_a_device():
    (model, optim), _ = build("mlp", "sgd")
    with pytest.raises(CaptureError, match="needs a CUDA device, and there is none"):
        compile(backend="cudagraph")(plain)(model, optim, torch.randn(6, 8))


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="this torch is built for CUDA, and asks the GPU that is not there",
)
@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ("adam", "reads its step counter on the host"),
        ("sgd", r"Sequential.0.weight and 4 more tensors are not on a CUDA device"),
    ],
)
def test_cuda_graph_of_what_it_cannot_do(optimizer, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (model, optim), _ = build("mlp", optimizer)
    with pytest.raises(CaptureError, match=text):
        compile(backend="cudagraph")(plain)(model, optim, torch.randn(6, 8))


@pytest.mark.parametrize(
    ("inductor", "text"),
    [
        (True, "Pass backend='inductor', or leave out enable_inductor"),
        (False, "more tensors are not on a CUDA device"),  # the transformation is fine
    ],
)
def test_cuda_graph_of_a_transformed_step(inductor, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (model, optim), _ = build("mlp", "sgd")

    @compile(
        backend="cudagraph",
        gm_transformation=lambda gm: IterGraphModule(gm, enable_inductor=inductor),
    )
    def step(model, optim, batch):
        plain(model, optim, batch)

    with pytest.raises(CaptureError, match=text):
        step(model, optim, torch.randn(6, 8))


def test_inductor_of_a_callable():
    (model, optim), _ = build("mlp", "sgd")
    step = compile(backend="inductor", gm_transformation=lambda gm: gm.forward)(plain)
    with pytest.raises(
        CaptureError,
        match=r"needs a gm_transformation that returns an fx\.GraphModule or an "
        r"IterGraphModule, not method",
    ):
        step(model, optim, torch.randn(6, 8))


@pytest.mark.parametrize("inside", [False, True])
def test_anomaly_detection(inside):
    def step(model, optim, batch):
        torch.autograd.set_detect_anomaly(True)
        plain(model, optim, batch)

    torch.autograd.set_detect_anomaly(not inside)
    try:
        (module, optim), _ = build("mlp", "sgd")
        with pytest.raises(CaptureError) as caught, pytest.warns():
            compile(step if inside else plain)(module, optim, torch.randn(6, 8))
    finally:
        torch.autograd.set_detect_anomaly(False)
    text = str(caught.value)
    assert "anomaly detection reads every gradient's values" in text
    assert "Leave torch.autograd.set_detect_anomaly() off" in text


def test_sparse_gradients():
    def step(model, optim, batch):
        model(torch.arange(3)).sum().backward()
        optim.step()

    model = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(CaptureError) as caught:
        compile(step)(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    assert "an operator makes a sparse gradient" in str(caught.value)
    assert "Make the embedding with sparse=False" in str(caught.value)


def test_tensors_inside_of_an_argument_that_require_gradients():
    @dataclass(eq=False)
    class Held:
        rows: torch.Tensor

    def step(model, optim, batch, given):
        plain(model, optim, given.rows)

    text = refusal(step, Held(torch.randn(6, 8, requires_grad=True)))
    assert "the step uses a tensor that is in no argument" in text
    assert "unless the tensor requires gradients" in text
    assert text.endswith("Here args[3] is a Held.")


@pytest.mark.parametrize(
    ("make", "words"),
    (
        (
            lambda: torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(3, 4)]),
            "nested",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(3, 4)], layout=torch.jagged),
            "nested",
        ),
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    ),
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR")
def test_tensors_that_are_not_strided_are_refused_by_name(make, words):
    model = nn.Linear(4, 1)
    optim, batch = torch.optim.SGD(model.parameters()), {"x": make()}

    def step(model, optim, batch):
        raise AssertionError

    with pytest.raises(CaptureError, match=rf"'x'\] is a {words} tensor.* offsets"):
        compile(step)(model, optim, batch)
