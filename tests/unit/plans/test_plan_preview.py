"""The preview as rows, text and JSON; the model stays as it was."""

import json

import pytest
import torch
from plan_families import build
from plan_models import GPT, MLP, Attention, fingerprint, tokens
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import PrepareModuleInput as TorchPrepare

from torchspmd.comm import Kind, Phase
from torchspmd.errors import PlanError, UsageError
from torchspmd.parallel import (
    ColwiseParallel,
    ExpertParallel,
    FusedColwiseParallel,
    KeyValueParallel,
    RowwiseParallel,
    SequenceParallel,
)
from torchspmd.parallel.plan.auto import auto_plan
from torchspmd.parallel.plan.plan import Plan

MLP_PLAN = Plan({"up": ColwiseParallel(), "down": RowwiseParallel()})


def rows(preview):
    return {row.name: row for row in preview.rows}


def test_each_parameter_has_its_layout_shape_and_bytes():
    found = rows(MLP_PLAN.preview(MLP(), {"tp": 4}))
    assert list(found) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert [row.layout for row in found.values()] == [
        "Shard(0)",
        "Shard(0)",
        "Shard(1)",
        "Replicate()",
    ]
    assert [row.local_shapes for row in found.values()] == [
        ((4, 8),),
        ((4,),),
        ((8, 4),),
        ((8,),),
    ]
    assert [row.local_bytes for row in found.values()] == [(128,), (16,), (128,), (32,)]


def test_repeated_layers_are_one_row():
    model = GPT()
    preview = auto_plan(model).preview(model, {"tp": 2})
    found = rows(preview)
    assert found["layers.[0-1].mlp.up.weight"].count == 2
    assert found["layers.[0-1].norm.weight"].style is None
    assert sum(row.count for row in preview.rows) == len(list(model.parameters()))
    assert preview.total_bytes == sum(p.nbytes for p in model.parameters())


def test_a_tied_parameter_is_counted_once():
    model = GPT(tied=True)
    preview = auto_plan(model).preview(model, {"tp": 2})
    assert preview.total_bytes == sum(p.nbytes for p in model.parameters())
    assert rows(preview)["embed.weight"].layout == "Shard(0)"


def test_uneven_shards_are_told_for_each_rank():
    preview = Plan({"": ColwiseParallel()}).preview(
        nn.Linear(4, 5, bias=False), {"tp": 4}
    )
    (row,) = preview.rows
    assert row.local_shapes == ((2, 4), (2, 4), (1, 4), (0, 4))
    assert [preview.bytes_on_rank(rank) for rank in range(4)] == [32, 32, 16, 0]
    assert preview.notes == (
        "weight is uneven: [2, 4] on the first rank, [0, 4] on the last; 1 ranks hold "
        "nothing.",
    )
    with pytest.raises(UsageError, match="the ranks of tp are 0 to 3"):
        preview.bytes_on_rank(4)


def test_fused_parts_and_shared_heads_are_counted_as_they_lie():
    fused = FusedColwiseParallel(parts=(16, 4, 4), num_heads=(8, 2, 2))
    (row, _) = Plan({"": fused}).preview(nn.Linear(8, 24), {"tp": 4}).rows
    assert row.layout == "Shard(0), Replicate(), Replicate()"
    assert row.local_shapes == ((4 + 4 + 4, 8),)
    few = Plan({"k": KeyValueParallel(num_heads=2)})
    assert rows(few.preview(Attention(), {"tp": 4}))["k.weight"].is_replicated
    assert not rows(few.preview(Attention(), {"tp": 2}))["k.weight"].is_replicated


def test_packed_parameters_are_cut_part_by_part():
    model = nn.Module()
    model.gate_up = nn.Parameter(torch.ones(2, 10, 4))
    style = ExpertParallel(parameter_placements=Shard(1), packed={"gate_up": 2})
    (row,) = Plan({"": style}).preview(model, {"tp": 2}).rows
    assert row.local_shapes == ((2, 3 + 3, 4), (2, 2 + 2, 4))
    assert (row.layout, row.parts) == ("Shard(1)", ((5, "Shard(1)"),) * 2)


@pytest.mark.parametrize(
    "style",
    [
        KeyValueParallel(num_heads=3),
        ExpertParallel(packed={"weights": 2}),
        ExpertParallel(parameter_placements=Replicate(), packed={"weight": 0}),
    ],
)
def test_a_style_that_does_not_fit_is_a_problem_of_the_plan(style):
    with pytest.raises(PlanError, match="the plan does not fit MLP"):
        Plan({"up": style}).preview(MLP(), {"tp": 2})


def test_a_style_that_does_not_tell_is_shown_as_unknown():
    style = TorchPrepare(input_layouts=Replicate(), desired_input_layouts=Shard(0))
    preview = Plan({"up": style}).preview(MLP(), {"tp": 2}, batch=1, seq=2)
    assert rows(preview)["up.weight"].layout == "unknown"
    assert "up sends an amount that is not known, and not counted." in preview.notes
    preview = Plan({"up": TorchColwise(output_layouts=Replicate())}).preview(
        MLP(), {"tp": 2}
    )
    assert rows(preview)["up.weight"].layout == "Shard(0)"


def test_the_text_is_a_table_of_80_columns():
    model = GPT()
    preview = auto_plan(model).preview(model, {"dp": 4, "tp": 2}, batch=2, seq=6)
    lines = str(preview).splitlines()
    assert max(map(len, lines)) <= 80
    assert "\n".join(lines[:9]) == TEXT_START
    assert "\n".join(lines[-20:]) == TEXT_END


TEXT_START = """\
GPT on tp=2 of the mesh dp=4, tp=2 (8 ranks)

parameter                        style    layout     shape on a rank  on a rank
-------------------------------  -------  ---------  ---------------  ---------
embed.weight                     Rowwise  Shard(0)   16 x 8               512 B
layers.[0-1].norm.weight         -        -          8                     64 B
layers.[0-1].norm.bias           -        -          8                     64 B
layers.[0-1].attention.q.weight  Colwise  Shard(0)   4 x 8                256 B
layers.[0-1].attention.q.bias    Colwise  Shard(0)   4                     32 B"""
TEXT_END = """\
Replicated: 8 of 30 parameters, 256 B on every rank (8.0 % of it).

Communication of one rank, in one forward and backward:

module                    phase     kind        times  sends
------------------------  --------  ----------  -----  -----
embed                     forward   all_reduce      1  384 B
layers.[0-1].attention.q  backward  all_reduce      2  768 B
layers.[0-1].attention.k  backward  all_reduce      2  768 B
layers.[0-1].attention.v  backward  all_reduce      2  768 B
layers.[0-1].attention.o  forward   all_reduce      2  768 B
layers.[0-1].mlp.up       backward  all_reduce      2  768 B
layers.[0-1].mlp.down     forward   all_reduce      2  768 B
head                      forward   all_gather      1  768 B
head                      backward  all_reduce      1  384 B

Forward: 6 collectives, 3.38 KiB payload, rank sends 2.62 KiB.
Backward: 9 collectives, 3.38 KiB payload, rank sends 3.38 KiB.

note: Shapes are those of a run on int64[2, 6]."""


def test_the_text_without_an_input_shape_says_what_to_pass():
    text = str(MLP_PLAN.preview(MLP(), {"tp": 2}))
    assert text.endswith(
        "Communication: pass batch= and seq= (--batch and --seq) to see it."
    )


def test_json_has_rows_totals_and_communication():
    preview = MLP_PLAN.preview(MLP(), {"tp": 4}, batch=2, seq=3)
    value = json.loads(preview.to_json())
    assert value["mesh"] == {"tp": 4}
    assert value["parameters"][0]["name"] == "up.weight"
    assert value["total_bytes"] == preview.total_bytes
    assert value["communication"] == [
        {
            "phase": "forward",
            "kind": "all_reduce",
            "module": "MLP.down",
            "count": 1,
            "payload_bytes": 2 * 3 * 8 * 4,
            "wire_bytes": 2 * 3 * 8 * 4 * 6 // 4,
        }
    ]


def test_a_model_on_meta_of_any_size_needs_no_memory():
    with torch.device("meta"):
        model = MLP(2**16, 2**18)
    preview = MLP_PLAN.preview(model, {"dp": 128, "tp": 8}, batch=1, seq=4096)
    assert preview.total_bytes > 2**37
    total = preview.ledger.total(kind=Kind.ALL_REDUCE, phase=Phase.FORWARD)
    assert total.payload_bytes == 4096 * 2**16 * 4


def test_the_model_is_as_it_was():
    model = GPT()
    before = fingerprint(model)
    auto_plan(model).preview(model, {"tp": 2}, batch=2, seq=6)
    assert fingerprint(model) == before


def test_inputs_can_be_given():
    by_place = MLP_PLAN.preview(MLP(), {"tp": 2}, example_inputs=(torch.ones(5, 8),))
    by_name = MLP_PLAN.preview(MLP(), {"tp": 2}, example_inputs={"x": torch.ones(5, 8)})
    for preview in (by_place, by_name):
        assert preview.ledger.total().payload_bytes == 5 * 8 * 4
    assert by_name.notes == ("Shapes are those of a run on x=float32[5, 8].",)


def test_a_model_that_needs_values_is_priced_layer_by_layer():
    class Model(GPT):
        def forward(self, ids):
            return super().forward(ids) if ids.sum().item() > 0 else None

    model = Model()
    plan = auto_plan(GPT())
    assumed = plan.preview(model, {"tp": 2}, batch=2, seq=6)
    known = plan.preview(GPT(), {"tp": 2}, example_inputs=(tokens(2, 6),))
    assert assumed.notes[0].startswith("The model does not run on shapes alone (")
    assert "called once on 2 x 6 tokens" in assumed.notes[0]
    assert assumed.ledger.total() == known.ledger.total()


def test_what_is_not_called_is_noted():
    model = MLP()
    model.spare = nn.LayerNorm(4)
    plan = MLP_PLAN | {"spare": SequenceParallel()}
    preview = plan.preview(model, {"tp": 2}, batch=1, seq=2)
    assert "spare was not called, so what it sends is not counted." in preview.notes


def test_a_plan_that_does_not_fit_has_no_preview():
    with pytest.raises(
        PlanError, match=r"^Plan.preview: the plan does not fit MLP on the mesh tp=2"
    ):
        Plan({"nothing": ColwiseParallel()}).preview(MLP(), {"tp": 2})


@pytest.mark.parametrize("options", [{"batch": 0}, {"seq": "many"}])
def test_a_number_of_tokens_must_be_a_number(options):
    with pytest.raises(UsageError, match="pass a number of at least 1"):
        MLP_PLAN.preview(MLP(), {"tp": 2}, **options)


class FixedHeads(Attention):
    def forward(self, x):
        q = self.q(x).view(*x.shape[:-1], 4, self.head_dim)
        return self.o(q.flatten(-2))


def test_sizes_that_are_written_into_a_forward_are_noted():
    plan = Plan({"q": ColwiseParallel(), "o": RowwiseParallel()})
    model = nn.Sequential(FixedHeads())
    plan = Plan({f"0.{name}": style for name, style in plan.items()})
    preview = plan.preview(model, {"tp": 2}, batch=2, seq=3)
    assert (
        "The forward fails on the shapes of one rank, RuntimeError in '0': "
        in preview.notes[-1]
    )
    assert "not from the config: -1 in a view" in preview.notes[-1]
    whole = plan.preview(model, {"tp": 1}, batch=2, seq=3)
    assert len(whole.notes) == 1


def test_a_forward_that_fails_on_one_rank_is_counted_layer_by_layer():
    class LocalHeads(FixedHeads):
        def forward(self, x):
            q = self.q(x).view(*x.shape[:-1], -1, self.head_dim)
            return self.o(q.flatten(-2))

    plan = Plan({"0.q": ColwiseParallel(), "0.o": RowwiseParallel()})
    fails, runs = (
        plan.preview(nn.Sequential(m), {"tp": 2}, batch=2, seq=3).ledger.total_by(
            "module", "phase", "kind"
        )
        for m in (FixedHeads(), LocalHeads())
    )
    assert fails == runs != {}


def test_a_preview_without_gradients_around_it_has_a_backward():
    model = GPT()
    plan = auto_plan(model)
    expected = plan.preview(model, {"tp": 2}, batch=2, seq=6).ledger.total_by("phase")
    with torch.no_grad():
        found = plan.preview(model, {"tp": 2}, batch=2, seq=6).ledger.total_by("phase")
    assert found == expected and len(found) == 2


def test_a_scripted_module_is_not_changed():
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    held = [id(p) for p in model.parameters()]
    plan = Plan({"0": ColwiseParallel(output_layouts=Replicate())})
    plan.preview(model, {"tp": 2}, batch=2, seq=3)
    assert [id(p) for p in model.parameters()] == held
    assert type(model[1].weight.data) is torch.Tensor


class TokensOfHeads(nn.Module):
    """With the heads of one device in a view, tokens take up what a rank lacks."""

    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        batch, tokens, _ = x.shape
        heads = self.q(x).view(batch, -1, 2, 4).softmax(1)
        return self.o(heads.reshape(batch, tokens, -1))


def test_heads_that_would_become_tokens_are_noted():
    plan = Plan({"q": ColwiseParallel(), "o": RowwiseParallel()})
    preview = plan.preview(TokensOfHeads(), {"tp": 2}, batch=2, seq=4)
    assert "The forward fails on the shapes of one rank" in preview.notes[-1]


@pytest.mark.parametrize(
    "style",
    [ColwiseParallel(), FusedColwiseParallel(parts=(32,) * 3)],
    ids=["colwise", "fused"],
)
def test_a_fused_layer_that_is_split_by_whole_sizes_is_noted(style):
    model = build("nanogpt")
    plan = Plan({"attn.c_attn": style, "attn.c_proj": RowwiseParallel()})
    note = plan.preview(model, {"tp": 2}, batch=2, seq=4).notes[-1]
    assert "The forward fails on the shapes of one rank, " in note and "'attn'" in note
    assert note.endswith("for a fused layer that it splits, split_whole=True.")


class NeedsMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x, mask):
        return self.up(x) if mask.all() else x


def test_assumed_calls_have_the_tokens_of_the_inputs():
    plan = Plan({"up": ColwiseParallel(output_layouts=Replicate())})
    inputs = (torch.ones(3, 5, 8), torch.ones(3, 5))
    preview = plan.preview(NeedsMask().eval(), {"tp": 2}, example_inputs=inputs)
    assert "taken to be called once on 3 x 5 tokens" in preview.notes[0]
    assert preview.ledger.total().payload_bytes == 4 * 15 * (16 + 8)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_forward_that_takes_sizes_from_tensors_is_not_noted(size):
    model = nn.Sequential(MLP(), Attention(16, 2, 8), nn.Linear(16, 8))
    model[0].down = nn.Linear(16, 16)
    plan = Plan(
        {
            "0.up": ColwiseParallel(),
            "0.down": RowwiseParallel(),
            "1.[qkv]": ColwiseParallel(),
            "1.o": RowwiseParallel(output_layouts=Shard(-1)),
            "2": RowwiseParallel(),
        }
    )
    assert len(plan.preview(model, {"tp": size}, batch=2, seq=3).notes) == 1
