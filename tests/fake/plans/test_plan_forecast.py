"""What a preview foretells is what a run records: collectives, modules, bytes."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise

from torchspmd import CommDebugMode
from torchspmd.errors import PlanError, PlanWarning
from torchspmd.parallel import (
    ColwiseParallel,
    ExpertParallel,
    FusedColwiseParallel,
    KeyValueParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.parallel.plan.auto import auto_plan
from torchspmd.parallel.plan.plan import Plan
from torchspmd.testing import fake_mesh

COLWISE, ROWWISE = ColwiseParallel(), RowwiseParallel()
SHARD, WHOLE = Shard(1), Replicate()
ROWWISE_SCATTER = RowwiseParallel(input_layouts=WHOLE, output_layouts=Shard(0))


class MLP(nn.Module):
    def __init__(self, width=12, hidden=24):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.norm = nn.LayerNorm(12)
        self.mlp = MLP()
        self.last = nn.RMSNorm(12)
        self.head = nn.Linear(12, 16, bias=False)

    def forward(self, tokens):
        return self.head(self.last(self.mlp(self.norm(self.embed(tokens)))))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.ones(4, 12, 24))
        self.down = nn.Parameter(torch.ones(4, 24, 12))

    def forward(self, x, weights):
        hidden = torch.einsum("td,edh->teh", x, self.up).relu()
        return torch.einsum("teh,ehd,te->td", hidden, self.down, weights)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(12, 12)
        self.router = nn.Linear(12, 4)
        self.experts = Experts()

    def forward(self, x):
        x = self.before(x)
        return self.experts(x, self.router(x).softmax(-1))


def check(model, plan, inputs, size=4):
    """Compare a preview with a recording, by module, phase, kind, count and bytes."""
    preview = plan.preview(model, {"tp": size}, example_inputs=inputs)
    with fake_mesh(size, ("tp",)) as mesh:
        model = parallelize_module(copy.deepcopy(model), mesh, plan)
        with CommDebugMode() as mode:
            output = model(*local(inputs, plan, size))
            getattr(output, "to_local", lambda: output)().sum().backward()
    by = ("module", "phase", "kind", "dtype", "axis")
    assert preview.ledger.total_by(*by) == mode.ledger.total_by(*by)
    return preview


def check_layer(layer, style, given, size=4):
    """The same for one layer; inside another, since a style changes its class."""
    return check(nn.Sequential(layer), Plan({"0": style}), (given,), size)


def local(inputs, plan, size):
    """The inputs as one rank gets them: whole, unless the model's own style says."""
    style = plan.get("", plan.get("0"))
    layouts = getattr(style, "input_layouts", None) or (WHOLE,) * len(inputs)
    layouts = layouts if isinstance(layouts, tuple) else (layouts,)
    parts = []
    for tensor, layout in zip(inputs, layouts, strict=True):
        is_cut = isinstance(layout, Shard)
        part = tensor.detach().chunk(size, layout.dim)[0] if is_cut else tensor.detach()
        parts.append(part.requires_grad_(tensor.requires_grad))
    return parts


def features(*shape, requires_grad=True):
    return torch.zeros(shape, requires_grad=requires_grad)


def tokens(*shape):
    return torch.zeros(shape, dtype=torch.long)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_pair_at_any_size(size, requires_grad):
    plan = Plan({"up": COLWISE, "down": ROWWISE})
    preview = check(
        MLP(), plan, (features(2, 8, 12, requires_grad=requires_grad),), size
    )
    assert preview.ledger.total(phase="backward").count == int(requires_grad)


@pytest.mark.parametrize(
    "style",
    [
        ColwiseParallel(input_layouts=given, output_layouts=wanted)
        for given in (Replicate(), Shard(0), Shard(1), Shard(-1))
        for wanted in (Replicate(), Shard(0), Shard(1), Shard(-1))
    ]
    + [
        RowwiseParallel(input_layouts=given, output_layouts=wanted)
        for given in (Replicate(), Shard(0), Shard(1), Shard(-1))
        for wanted in (Replicate(), Shard(0), Shard(1), Shard(-1), Partial())
    ],
    ids=str,
)
def test_a_linear_between_any_layouts(style):
    check_layer(nn.Linear(12, 24), style, features(8, 16, 12))


@pytest.mark.parametrize("wanted", [Replicate(), Shard(0), Shard(1), Shard(-1)])
@pytest.mark.parametrize("kind", [ColwiseParallel, RowwiseParallel])
def test_an_embedding(kind, wanted):
    style = kind(input_layouts=WHOLE, output_layouts=wanted)
    check_layer(nn.Embedding(16, 8), style, tokens(8, 16))


def test_dimensions_that_do_not_divide_are_padded_on_the_wire():
    gather = ColwiseParallel(output_layouts=WHOLE)
    check_layer(nn.Linear(5, 7), gather, features(2, 5))
    scatter = RowwiseParallel(input_layouts=WHOLE, output_layouts=Shard(-1))
    check_layer(nn.Linear(5, 7), scatter, features(2, 5))


def test_sequence_parallel_with_dtensors_between():
    plan = Plan(
        {
            "embed": RowwiseParallel(input_layouts=WHOLE, output_layouts=SHARD),
            "norm": SequenceParallel(),
            "mlp.up": ColwiseParallel(input_layouts=SHARD),
            "mlp.down": RowwiseParallel(output_layouts=SHARD, use_local_output=False),
            "last": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=SHARD, output_layouts=WHOLE),
        }
    )
    preview = check(Normed(), plan, (tokens(2, 8),))
    kinds = preview.ledger.total_by("kind", "phase")
    assert kinds["reduce_scatter", "forward"].count == 2
    assert kinds["all_gather", "forward"].count == 3


def test_sequence_parallel_takes_the_layout_from_a_dtensor():
    # The styles' own input_layouts say Replicate(); the norm returns Shard(1).
    plan = Plan(
        {
            "embed": RowwiseParallel(input_layouts=WHOLE, output_layouts=SHARD),
            "norm": SequenceParallel(),
            "mlp.up": COLWISE,
            "mlp.down": ROWWISE,
        }
    )
    check(Normed(), plan, (tokens(2, 8),))


class Three(nn.Module):
    """Three layers that read one tensor, as the projections of attention do."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.o = nn.Linear(12, 12)

    def forward(self, x):
        return self.o(self.q(x) * self.k(x) + self.v(x))


@pytest.mark.parametrize("local_output", [False, True])
def test_layers_that_share_a_dtensor_sum_its_gradient_once(local_output):
    prepare = PrepareModuleInput(
        input_layouts=SHARD, desired_input_layouts=WHOLE, use_local_output=local_output
    )
    plan = Plan({"": prepare, "[qkv]": COLWISE, "o": ROWWISE})
    preview = check(Three(), plan, (features(2, 8, 12),))
    assert preview.ledger.total(phase="backward").count == (3 if local_output else 1)


def test_an_output_that_is_a_dtensor_is_summed_where_it_was_made():
    down = RowwiseParallel(use_local_output=False)
    model = nn.Sequential(MLP(), Three())
    plan = Plan({"0.up": COLWISE, "0.down": down, "1.[qkv]": COLWISE, "1.o": ROWWISE})
    check(model, plan, (features(2, 8, 12),))


def test_prepared_inputs_and_outputs():
    prepare = PrepareModuleInput(input_layouts=SHARD, desired_input_layouts=WHOLE)
    plan = Plan({"": prepare, "up": COLWISE, "down": ROWWISE})
    check(MLP(), plan, (features(2, 8, 12),))
    scatter = PrepareModuleOutput(
        output_layouts=Partial(), desired_output_layouts=SHARD
    )
    down = RowwiseParallel(output_layouts=Partial())
    plan = Plan({"": scatter, "up": COLWISE, "down": down})
    check(MLP(), plan, (features(2, 8, 12),))
    both = PrepareModuleInputOutput(
        input_layouts=SHARD,
        desired_input_layouts=WHOLE,
        output_layouts=Partial(),
        desired_output_layouts=SHARD,
    )
    plan = Plan({"": both, "up": COLWISE, "down": down})
    check(MLP(), plan, (features(2, 8, 12),))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_fused_parts_and_shared_heads(size):
    fused = FusedColwiseParallel(parts=(32, 8, 8), num_heads=(16, 4, 4))
    check_layer(nn.Linear(12, 48), fused, features(2, 8, 12), size)
    few = KeyValueParallel(num_heads=2)
    check_layer(nn.Linear(12, 8), few, features(2, 8, 12), size)


@pytest.mark.parametrize("wanted", [WHOLE, Shard(0)])
def test_experts(wanted):
    experts = ExpertParallel(
        input_layouts=(WHOLE, WHOLE),
        desired_input_layouts=(WHOLE, Shard(-1)),
        output_layouts=wanted,
    )
    plan = Plan({"experts": experts, "router": ReplicateParallel()})
    check(Mixture(), plan, (features(8, 12),))


class WithShared(Experts):
    """Experts with a parameter that every rank holds whole."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x, weights):
        return super().forward(x * self.scale, weights)


def test_the_gradients_of_parameters_that_experts_share_are_summed():
    model = Mixture()
    model.experts = WithShared()
    experts = ExpertParallel(
        parameter_placements={"up": Shard(0), "down": Shard(0), "scale": WHOLE},
        input_layouts=(WHOLE, WHOLE),
        desired_input_layouts=(WHOLE, Shard(-1)),
    )
    check(model, Plan({"experts": experts}), (features(8, 12),))


@pytest.mark.parametrize("local_output", [False, True])
def test_a_replicated_module_beside_sharded_ones(local_output):
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), MLP())
    plan = Plan(
        {
            "0": ColwiseParallel(output_layouts=WHOLE, use_local_output=False),
            "1": ReplicateParallel(use_local_output=local_output),
            "2.up": COLWISE,
            "2.down": ROWWISE,
        }
    )
    check(model, plan, (features(2, 8, 12),))


def test_a_replicated_module_gathers_a_dtensor():
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    plan = Plan(
        {"0": ColwiseParallel(use_local_output=False), "1": ReplicateParallel()}
    )
    check(model, plan, (features(2, 8, 12),))


def test_a_module_that_is_called_twice_counts_twice():
    class Twice(MLP):
        def forward(self, x):
            return super().forward(super().forward(x))

    plan = Plan({"up": COLWISE, "down": ROWWISE})
    preview = check(Twice(), plan, (features(2, 8, 12),))
    assert preview.ledger.total(phase="forward").count == 2


def test_frozen_parameters_and_other_dtypes():
    model = Normed().to(torch.bfloat16)
    model.embed.requires_grad_(False)
    check(model, auto_plan(model), (tokens(2, 8),))


def test_modules_that_compute_on_dtensors_are_counted_as_they_run():
    class OwnNorm(nn.LayerNorm):
        """A subclass may do anything, so that DTensor computes it."""

    style = SequenceParallel(sequence_dim=0, use_local_output=True)
    plan = Plan({"0": ROWWISE_SCATTER, "1": style})
    model = nn.Sequential(nn.Linear(12, 12), OwnNorm(12))
    preview = check(model, plan, (features(8, 12),))
    assert preview.ledger.total(module="Sequential.1").count


@pytest.mark.parametrize("size", [2, 4])
def test_styles_of_torch_are_counted_as_they_run(size):
    plan = Plan({"up": TorchColwise(), "down": TorchRowwise()})
    preview = check(MLP(), plan, (features(2, 8, 12),), size)
    assert preview.ledger.total().count > 1


def test_a_preview_is_no_communication_and_needs_no_group():
    plan = Plan({"up": COLWISE, "down": ROWWISE})
    expected = plan.preview(MLP(), {"tp": 4}, batch=2, seq=8).ledger.total()
    with fake_mesh(2, ("tp",)) as mesh, CommDebugMode() as mode:
        group = dist.group.WORLD
        for where in (mesh, {"tp": 4}):
            preview = plan.preview(MLP(), where, batch=2, seq=8)
        assert dist.group.WORLD is group
        assert mode.ledger.total().count == 0
        dist.all_reduce(torch.ones(2))
        assert mode.ledger.total().count == 1
    assert preview.ledger.total() == expected
    assert not dist.is_initialized()


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(12, 24), nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "a": nn.LayerNorm(12),
                    "b": Three(),
                    "c": nn.LayerNorm(12),
                    "d": Gated(),
                }
            )
            for _ in range(2)
        )

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["b"](x=layer["a"](x))
            x = x + layer["d"](layer["c"](x))
        return x


def test_shared_inputs_need_two_sums_a_layer_instead_of_five():
    model = Layers()
    plan = auto_plan(model)
    shared = plan.share_inputs(model)
    assert set(shared) - set(plan) == {"layers.*.b", "layers.*.d"}
    assert (
        check(model, plan, (tokens(2, 8),)).ledger.total(phase="backward").count == 10
    )
    assert (
        check(model, shared, (tokens(2, 8),)).ledger.total(phase="backward").count == 4
    )


def test_an_input_that_something_else_reads_is_not_shared():
    class Reads(Gated):
        def forward(self, x):
            return x * 2 + super().forward(x)

    plan = Plan({"gate": COLWISE, "up": COLWISE, "down": ROWWISE})
    assert plan.share_inputs(Gated()) != plan
    with pytest.warns(PlanWarning) as caught:
        assert plan.share_inputs(Reads()) == plan
    assert str(caught[0].message) == (
        "Plan.share_inputs: nothing in Reads could be shared, and the plan stays as it is."
        "\n  * 'gate', 'up': the tensor that they read is also read by mul, which would "
        "get a DTensor; hand them one of their own, such as the output of a norm"
    )
    assert caught[0].filename == __file__
    # A module that has a style keeps it.
    styled = plan | {
        "": PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=WHOLE)
    }
    with pytest.warns(PlanWarning, match="no module without a style has two column-w"):
        assert styled.share_inputs(Gated()) == styled


def test_why_nothing_is_shared():
    class Apart(Gated):
        def forward(self, x):
            return self.gate(x) * self.up(x.tanh())

    class Within(Gated):
        def forward(self, x):
            return super().forward(x.tanh())

    class Twice(Gated):
        def forward(self, x):
            return self.gate(x) * self.up(x) + F.linear(x, self.up.weight)

    class Never(nn.Sequential):
        def forward(self, x):
            return x

    plan = Plan({"gate": COLWISE, "up": COLWISE, "down": ROWWISE})
    for model, reason in (
        (Apart(), "they do not read one tensor"),
        (Within(), "the tensor that they read is not an argument of ''"),
        (Twice(), "is also read by another Linear"),
    ):
        with pytest.warns(PlanWarning, match=f"'gate', 'up': .*{reason}"):
            assert plan.share_inputs(model) == plan
    never = Plan({f"0.{path}": style for path, style in plan.items()})
    with pytest.warns(PlanWarning, match="'0.gate', '0.up': '0' was not called"):
        never.share_inputs(Never(Gated()), example_inputs=(torch.ones(1),))


def test_a_model_that_needs_values_cannot_be_looked_at():
    class Values(Gated):
        def forward(self, x):
            return super().forward(x) if x.sum().item() else x

    plan = Plan({"gate": COLWISE, "up": COLWISE, "down": ROWWISE})
    with pytest.raises(
        PlanError, match=r"^Plan.share_inputs: Values does not run on sha"
    ):
        plan.share_inputs(Values())
