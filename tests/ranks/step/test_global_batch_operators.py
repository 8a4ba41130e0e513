"""The default mode against one device: operators that DTensor has no rule for, and draws.

Each step makes several terms at once. The ranks have one seed, and halves of the batch with
the same values, so that numbers which both ranks draw show up.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torchspmd.errors import CaptureError
from torchspmd.step import compile


def shifted(o):
    made = torch.zeros_like(o)
    made[:, 1:] = o[:, :-1]
    made[:, :1] = 2
    return made


def added_to_each(o):
    values = [o.sum(0), o * 1]
    torch._foreach_add_(values, torch.tensor(2.0))
    return values[0] * values[1]


LOSSES = {
    "mse": F.mse_loss,
    "sum of mse": lambda o, y: F.mse_loss(o, y, reduction="sum"),
    "weighted mse": lambda o, y: F.mse_loss(o, y, reduction="none") @ torch.arange(8.0),
    "smooth_l1": lambda o, y: F.smooth_l1_loss(o, y, beta=0.5),
    "huber": lambda o, y: F.huber_loss(o, y, delta=0.3),
    "bce": lambda o, y: F.binary_cross_entropy(o.sigmoid(), y.sigmoid()),
    "bce with logits": lambda o, y: F.binary_cross_entropy_with_logits(
        o, y.sigmoid(), pos_weight=torch.arange(1.0, 9.0)
    ),
    "soft margin": lambda o, y: F.soft_margin_loss(o, y.sign()),
}
ACTIVATIONS = {
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "logsigmoid": F.logsigmoid,
    "glu": F.glu,
    "index_select": lambda o: o.index_select(1, torch.tensor([0, 5])),
    "shifted": shifted,
    "power of a number": lambda o: 2 ** o.mean(),
    "number over a sum": lambda o: torch.div(3.0, o.square().sum(0) + torch.ones(8)),
    # DTensor takes the second for the first, which it has seen.
    "sum and numbers": lambda o: (o.sum(0) + torch.ones(8)) * (o.sum(0) + 1.0),
    "foreach by a tensor": added_to_each,
    "place of the largest": lambda o: o * o.argmax(0) * o.argmin(),
    "covariance": lambda o: torch.cov(o.T) + torch.corrcoef(o.T),
    "pairwise": lambda o: F.pairwise_distance(o, 2 * o.detach()),
}
LAYERS = {
    "group norm": nn.GroupNorm(2, 4),
    "prelu": nn.PReLU(4),
    "average": nn.AvgPool2d(2),
    "largest": nn.AdaptiveMaxPool2d(2),
    "reflected": nn.ReflectionPad2d(1),
    "replicated": nn.ReplicationPad2d(1),
    "unfolded": nn.Unfold(2),
    "instance norm": nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    # Few pixels, and a write behind a batch norm.
    "residual": nn.Sequential(
        *(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        nn.Conv2d(4, 4, 3, padding=1),
    ),
}
RECURRENT = (
    nn.LSTM(8, 8, num_layers=2),
    nn.LSTM(8, 8, batch_first=True, bidirectional=True),
    nn.GRU(8, 8, batch_first=True),
    nn.RNN(8, 8),
)
DRAWS = {
    "randn_like": lambda o: o * torch.randn_like(o),
    "of a transpose": lambda o: o.T * torch.rand_like(o.T),
    "uniform_": lambda o: o * torch.empty_like(o).uniform_(),
    "bernoulli": lambda o: o * torch.bernoulli(o.detach().sigmoid()),
    "multinomial": lambda o: o.gather(1, torch.multinomial(o.softmax(-1), 1)),
    "gumbel": F.gumbel_softmax,
    "dropout of a transpose": lambda o: F.dropout(o.T, 0.5),
    "dropout of equal rows": lambda o: F.dropout(o[:, None].expand(-1, 3, -1), 0.5),
    "alpha dropout": lambda o: F.alpha_dropout(o, 0.5, training=True),
    "attention": lambda o: F.scaled_dot_product_attention(
        *(o.unflatten(1, (1, 2, 4)),) * 3, dropout_p=0.5
    ),
}


def terms_of(forms, model, x):
    """One term for each form, and a loss of all."""
    terms = {name: form(model(x), x) for name, form in forms.items()}
    return terms, sum(term.square().mean() for term in terms.values())


def train(forms, model, wrap, rows):
    def step(model, optim, x):
        terms, loss = terms_of(forms, model, x)
        loss.backward()
        optim.step()
        optim.zero_grad()
        return {name: term.square().mean() for name, term in terms.items()}

    torch.manual_seed(0)
    half = torch.randn(4, *model.shape)
    x = torch.cat([half, half])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    optim = torch.optim.SGD(model.parameters(), lr=1e-4)
    wrapped = wrap(step)
    for _ in range(2):
        terms = wrapped(model, optim, x[rows])
    return {**terms, **dict(model.named_parameters()), **dict(model.named_buffers())}


def compared(forms, make):
    """What differs from one device, on this rank."""
    start = 4 * dist.get_rank()
    whole = train(forms, make(), lambda step: step, slice(0, 8))
    ours = train(forms, make(), compile, slice(start, start + 4))
    wrong = []
    for name, value in whole.items():
        try:
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            wrong.append((name, str(error)))
    return wrong


def linear():
    model = nn.Linear(8, 8)
    model.shape = (8,)
    return model


def layers():
    model = nn.Conv2d(4, 4, 1)
    model.shape = (4, 6, 6)
    for number, layer in enumerate(LAYERS.values()):
        model.add_module(f"layer{number}", layer)
    return model


class Recurrent(nn.Module):
    shape = (3, 8)

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        x = x if self.layers.batch_first else x.transpose(0, 1)
        return self.layers(x)[0]


def recurrent_wrong():
    output = {"output": lambda o, x: o}
    return [
        wrong
        for layers in RECURRENT
        for wrong in compared(output, lambda layers=layers: Recurrent(layers))
    ]


@pytest.mark.newer_torch("DTensor has fewer rules")
def test_recurrent_layers(ranks2):
    assert ranks2.run(recurrent_wrong) == [[], []]


def all_wrong():
    takes_output = {
        name: lambda o, x, form=form: form(o)
        for name, form in {**ACTIVATIONS, **DRAWS}.items()
    }
    applies = {name: lambda o, x, to=layer: to(o) for name, layer in LAYERS.items()}
    return [
        *compared(LOSSES, linear),
        *compared(takes_output, linear),
        *compared(applies, layers),
    ]


@pytest.mark.newer_torch("DTensor has fewer rules")
def test_losses_activations_layers_and_draws(ranks2):
    assert ranks2.run(all_wrong) == [[], []]


def refused():
    def step(model, x):
        return F.rrelu(model(x), training=True)

    try:
        compile(step)(nn.Linear(8, 8), torch.randn(4, 8))
    except CaptureError as error:
        return str(error)


def test_what_draws_inside_its_kernel_is_refused(ranks2):
    text, _ = ranks2.run(refused)
    assert "an operator has no sharding rule" in text
    assert "rrelu_with_noise.default draws random numbers inside its kernel" in text
    assert "parallel_mode=DataParallel('replicate', reduce='avg')" in text
