"""Plans inferred from which Linears feed which, and the refusals."""

import re

import pytest
import torch
import torch.nn.functional as F
from plan_models import GPT, MLP, fingerprint
from torch import nn
from torch.distributed.tensor import Replicate

from torchspmd.errors import PlanError
from torchspmd.parallel import (
    ColwiseParallel,
    FusedColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)
from torchspmd.parallel.plan.auto import auto_plan
from torchspmd.parallel.plan.plan import Plan

COLWISE, ROWWISE = ColwiseParallel(), RowwiseParallel()
HEAD = ColwiseParallel(output_layouts=Replicate())
GPT_PLAN = Plan(
    {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention.q": COLWISE,
        "layers.*.attention.k": COLWISE,
        "layers.*.attention.v": COLWISE,
        "layers.*.attention.o": ROWWISE,
        "layers.*.mlp.up": COLWISE,
        "layers.*.mlp.down": ROWWISE,
        "head": HEAD,
    }
)


def refusal(model, **options):
    with pytest.raises(PlanError) as caught:
        auto_plan(model, **options)
    return str(caught.value)


class Pair(nn.Module):
    """Two Linears with something between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.third = nn.Linear(4, 12)
        self.norm = nn.LayerNorm(12)
        self.between = between

    def forward(self, x):
        return x + self.between(self, self.first(x), x)


def pair_plan(between, **options):
    return auto_plan(
        Pair(between),
        leave=("third",),
        example_inputs=(torch.ones(2, 8, 12),),
        **options,
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformer_gets_the_usual_plan(tied):
    model = GPT(tied)
    before = fingerprint(model)
    assert auto_plan(model) == GPT_PLAN
    assert fingerprint(model) == before


def test_values_and_random_numbers_are_not_used():
    with torch.device("meta"):
        model = GPT()
    state = torch.get_rng_state()
    assert auto_plan(model) == GPT_PLAN
    assert torch.equal(torch.get_rng_state(), state)


def heads(a):
    return a.view(2, 8, 3, 4)


@pytest.mark.parametrize(
    "between",
    [
        torch.relu,
        lambda a: F.dropout(F.gelu(a) * 2 + 1, 0.1),
        lambda a: F.silu(a) * a.sigmoid(),
        lambda a: a.masked_fill(a > 0, 0.0),
        lambda a: torch.where(a < 0, a, 0.0),
        lambda a: a.to(torch.float64).type_as(a)[:, None].squeeze(1),
        lambda a: a * torch.ones(8, 1),
        lambda a: heads(a).softmax(-1).flatten(2),
        lambda a: heads(a).permute(0, 2, 1, 3).transpose(1, 2).flatten(2),
        lambda a: torch.cat([h.neg() for h in heads(a).chunk(2, -1)], -1).flatten(2),
        lambda a: heads(a).mean(-1, keepdim=True).expand(2, 8, 3, 4).flatten(2),
        lambda a: heads(a).sum(-1).repeat_interleave(4, -1),
        lambda a: heads(a)[..., :1].expand(2, 8, 3, 4).reshape(2, 8, 12),
        lambda a: torch.view_as_real(
            torch.view_as_complex(heads(a).unflatten(-1, (2, 2)))
        ).flatten(2),
    ],
)
def test_features_are_followed_through(between):
    plan = pair_plan(lambda module, a, x: module.second(between(a)))
    assert plan == Plan({"first": COLWISE, "second": ROWWISE})


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda m, a, x: m.second(m.norm(a)), "the parameter 'norm.weight' is used"),
        (
            lambda m, a, x: m.second(a + x),
            "they are combined with a tensor that is whole",
        ),
        (lambda m, a, x: m.second(a.softmax(-1)), "they are compared or summed up"),
        (lambda m, a, x: m.second(a / a.sum(-1, keepdim=True)), "they are summed up"),
        (lambda m, a, x: m.second(a.flip(-1)), "the torch function flip is applied"),
        (
            lambda m, a, x: m.second(
                sum(F.pad(part, (0, 8)) for part in a.split(4, -1))
            ),
            "the torch function pad is applied",
        ),
        (
            lambda m, a, x: m.second(torch.fft.fft(a).real),
            "the torch function fft_fft is applied, for which no rule is known",
        ),
        (
            lambda m, a, x: m.second(a.view(2, 8, 3, 4).transpose(2, 3).flatten(2)),
            "mixes dimension 3 with the one before it",
        ),
        (
            lambda m, a, x: m.second(a.transpose(1, 2)[:, :, :1].expand(2, 12, 12)).sum(
                1, keepdim=True
            ),
            "not the last",
        ),
        (
            lambda m, a, x: m.second(a[..., :6].repeat(1, 1, 2)),
            "a part of them is taken",
        ),
        (
            lambda m, a, x: m.second(
                torch.cat([a[..., None], x[..., None]], -1).sum(-1)
            ),
            "joined with other features",
        ),
        (
            lambda m, a, x: F.linear(F.relu(a), m.second.weight * 2),
            "they are multiplied with a computed weight",
        ),
    ],
)
def test_features_that_are_needed_whole_are_named_with_the_reason(between, reason):
    with pytest.raises(PlanError) as caught:
        pair_plan(between)
    text = str(caught.value)
    assert text.startswith("auto_plan: not everything in Pair could be placed\n\n")
    named = r"  \* 'first'(, 'second' each)?: its output features are needed whole: "
    assert re.search(named, text)
    assert reason in text
    assert text.endswith(
        "Name these in leave= to keep them whole on every rank, or write a Plan by hand."
    )


def test_of_three_in_a_row_the_last_is_named():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.LayerNorm(4))
    text = refusal(model)
    assert "'2': it reads the features of '1'" in text or "'2': its output" in text
    assert "'0'" not in text and "'1':" not in text
    assert auto_plan(model, leave=("2",)) == Plan({"0": COLWISE, "1": ROWWISE})


def test_a_linear_that_reads_shards_once_and_a_whole_once_is_not_row_wise():
    def twice(module, a, x):
        return module.second(F.relu(a)) + module.second(x)

    with pytest.raises(
        PlanError, match="'first': it feeds 'second', which cannot be row"
    ):
        pair_plan(twice)


def test_what_is_left_counts_as_whole():
    plan = auto_plan(GPT(), leave=("layers.*.attention",))
    assert set(plan) == {"embed", "layers.*.mlp.up", "layers.*.mlp.down", "head"}
    text = refusal(GPT(), leave=("layers.0.mlp.down",))
    assert (
        "'layers.0.mlp.up': it feeds 'layers.0.mlp.down', which cannot be row" in text
    )


def test_one_odd_layer_gets_patterns_of_its_own():
    plan = auto_plan(GPT(), leave=("layers.1.mlp",))
    assert "layers.0.mlp.up" in plan and "layers.*.mlp.up" not in plan


def test_a_leave_that_matches_nothing_is_an_error():
    text = refusal(GPT(), leave=("layers.*.mpl",))
    assert "leave: 'layers.*.mpl' matches no module" in text
    assert "nearest: 'layers.*.mlp'" in text


def test_parameters_of_unknown_modules_are_named():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = MLP()
            self.mix = nn.Conv1d(8, 8, 1)

        def forward(self, x):
            return self.mix(self.mlp(x).mT).mT

    text = refusal(Model())
    assert "'mix': Conv1d has parameters of its own (weight), and no rule says" in text


def test_a_linear_that_is_not_called_is_named():
    model = MLP()
    model.spare = nn.Linear(2, 2)
    assert "'spare': it was not called in the run" in refusal(model)


def test_a_model_that_needs_values_is_refused():
    class Model(MLP):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x

    text = refusal(Model())
    assert text.startswith("auto_plan: Model does not run on shapes alone (")
    assert text.endswith("Pass example_inputs=, or write a Plan by hand.")


def test_a_model_without_linears_is_refused():
    assert "it has no Embedding and no Linear" in refusal(nn.ReLU())


def test_inputs_can_be_given_by_name():
    plan = auto_plan(MLP(), example_inputs={"x": torch.ones(3, 8)})
    assert plan == Plan({"up": COLWISE, "down": ROWWISE})


def test_writing_into_a_tensor_ends_the_trail():
    def between(module, a, x):
        a[..., 0] = x[..., 0]
        return module.second(a)

    with pytest.raises(PlanError, match="torch function __setitem__ is applied"):
        pair_plan(between)


class Hidden(torch.autograd.Function):
    """Hands back a tensor that no torch function has made."""

    @staticmethod
    def forward(ctx, a):
        with torch._C.DisableTorchFunction():
            return a.flip(-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.flip(-1)


def test_what_torch_functions_do_not_show_is_refused():
    with pytest.raises(PlanError, match="not a torch function before it calls linear"):
        pair_plan(lambda module, a, x: module.second(Hidden.apply(a)))


def test_a_call_that_no_rule_foresees_is_refused():
    with pytest.raises(PlanError, match="they are summed up"):
        pair_plan(lambda module, a, x: module.second(a.sum(()) * x))


class Fused(nn.Module):
    """Features that are split, by whole sizes, before they are used."""

    def __init__(self, split, also_whole=False):
        super().__init__()
        self.both, self.down = nn.Linear(8, 24), nn.Linear(12, 8)
        self.split, self.also_whole = split, also_whole

    def forward(self, x):
        both = self.both(x)
        gate, up = self.split(both)
        x = x + self.down(F.silu(gate) * up)
        return x + both.sum() if self.also_whole else x


@pytest.mark.parametrize(
    "split",
    [
        lambda t: t.split(12, -1),
        lambda t: torch.split(t, [12, 12], 2),
        lambda t: t.chunk(2, dim=-1),
        lambda t: torch.tensor_split(t, 2, dim=-1),
    ],
)
def test_a_layer_whose_features_are_split_is_cut_part_by_part(split):
    style = FusedColwiseParallel(parts=(12, 12), split_whole=True)
    assert auto_plan(Fused(split)) == Plan({"both": style, "down": ROWWISE})


def test_a_layer_that_is_split_and_used_whole_is_refused():
    text = refusal(Fused(lambda t: t.chunk(2, -1), also_whole=True))
    assert "they are split into parts, and used as a whole by sum" in text


def test_a_tensor_whose_gradient_would_be_partial_ends_the_features():
    text = refusal(
        Pair(lambda m, a, x: m.second(a * m.norm(x)[..., :1])),
        leave=("third",),
        example_inputs=(torch.ones(2, 8, 12),),
    )
    assert "combines them with a tensor whose gradient would be one rank's part" in text


class HeadNorms(nn.Module):
    """A norm of each head between two Linears; its weight is used as it is, or computed."""

    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)
        self.plain, self.computed = nn.RMSNorm(4), ScaledNorm()

    def forward(self, x):
        heads = self.q(x).unflatten(-1, (-1, 4))
        heads = self.computed(self.plain(heads).transpose(1, 2)).transpose(1, 2)
        return x + self.o(heads.flatten(2))


class ScaledNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x * (1.0 + self.weight.float())


def test_norms_of_heads_sum_their_gradients():
    model = HeadNorms()
    plan = auto_plan(model, example_inputs=(torch.ones(2, 2, 8),))
    assert plan["plain"] == SequenceParallel(sequence_dim=-2, use_local_output=True)
    assert plan["computed"] == SequenceParallel(sequence_dim=-3, use_local_output=True)
    text = refusal(model, leave=("plain",), example_inputs=(torch.ones(2, 2, 8),))
    assert "'plain' works on the shards of 'q', so that its gradients must be" in text
    frozen = HeadNorms().requires_grad_(False)
    assert list(auto_plan(frozen, example_inputs=(torch.ones(2, 2, 8),))) == ["q", "o"]


class NeedsValues(nn.Module):
    """Drops its layers in training by chance, as some encoders do."""

    def __init__(self, always=False):
        super().__init__()
        self.up, self.down, self.always = nn.Linear(8, 16), nn.Linear(16, 8), always

    def forward(self, x):
        if (self.training or self.always) and torch.rand(()) < 0.1:
            return x
        return x + self.down(self.up(x).relu())


def test_a_model_that_needs_values_in_training_is_run_in_eval_mode():
    assert auto_plan(NeedsValues()) == Plan({"up": COLWISE, "down": ROWWISE})


def test_the_message_does_not_ask_for_inputs_that_were_given():
    model = nn.Sequential(NeedsValues(always=True))
    text = refusal(model, example_inputs=(torch.ones(2, 8),))
    assert "('0' needs the values of tensors, by aten._local_scalar_dense" in text
    assert text.endswith("). Write a Plan by hand.")
    assert "Pass example_inputs=" in refusal(model)


def test_a_class_that_is_no_plain_linear_is_named():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    text = refusal(nn.Sequential(Scaled(8, 8)))
    assert "'0': its class is Scaled, not plain nn.Linear" in text


def test_an_embedding_that_reads_its_rows_otherwise_is_named():
    class Positions(nn.Embedding):
        def forward(self, x):
            return self.weight[: x.size(1)]

    text = refusal(nn.Sequential(Positions(8, 8)))
    assert "'0': it was not called, or Positions reads its rows in a way of its" in text
