"""Every error of the styles: it names the module, the argument, the mesh and the fix."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchspmd.errors import LayoutError, PlanError, SpmdError, UsageError, WorldError
from torchspmd.parallel import (
    ColwiseParallel,
    ExpertParallel,
    FusedColwiseParallel,
    KeyValueParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.testing import fake_mesh


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"query": nn.Linear(8, 16)})
        self.norm = nn.LayerNorm(8)


# --- the mesh -------------------------------------------------------------------------


def test_a_mesh_with_two_named_axes(dp2_tp4: DeviceMesh) -> None:
    text = r'mesh dp=2, tp=4 has 2 axes.*Pass one axis of it, such as mesh\["tp"\]\.'
    with pytest.raises(LayoutError, match=text):
        parallelize_module(nn.Linear(8, 8), dp2_tp4, ColwiseParallel())


def test_a_mesh_with_two_axes_without_names() -> None:
    with fake_mesh((2, 4)) as mesh:
        with pytest.raises(
            LayoutError, match=r'0=2, 1=4.*mesh_dim_names=\("dp", "tp"\)'
        ):
            parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel())


def test_something_that_is_no_mesh() -> None:
    with pytest.raises(LayoutError, match=r"device_mesh is a tuple. Pass a DeviceMesh"):
        parallelize_module(nn.Linear(8, 8), (4,), ColwiseParallel())


def test_no_mesh_at_all() -> None:
    with pytest.raises(LayoutError, match=r"no device_mesh.*inside `with mesh:`"):
        parallelize_module(nn.Linear(8, 8), None, ColwiseParallel())


def test_a_mesh_without_this_rank() -> None:
    with fake_mesh(4, ("all",), rank=3):
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        with pytest.raises(
            WorldError, match=r"rank 3 is not in the mesh tp=2.*\[0, 1\]"
        ):
            parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel())


# --- the plan -------------------------------------------------------------------------


def refuse(plan: Any, *texts: str, model: nn.Module | None = None) -> None:
    """The plan is refused with these texts, and the model is as it was."""
    model = Model() if model is None else model
    before = {name: (id(m), type(m)) for name, m in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    with fake_mesh(4, ("tp",)) as mesh, pytest.raises(PlanError) as error:
        parallelize_module(model, mesh, plan)
    for text in texts:
        assert text in str(error.value)
    assert {name: (id(m), type(m)) for name, m in model.named_modules()} == before
    for name, value in model.state_dict().items():
        assert not isinstance(value, DTensor)
        assert torch.equal(value, state[name])


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    plan = {"attention.query": ColwiseParallel(), "attn.query": ColwiseParallel()}
    refuse(plan, "'attn.query'", "attention.query")


def test_a_style_that_does_not_fit_its_module() -> None:
    refuse(
        {"norm": ColwiseParallel()}, "only support nn.Linear and nn.Embedding", "norm"
    )


def test_a_tie_that_would_be_broken() -> None:
    model = Model()
    model.head = nn.Linear(8, 16, bias=False)
    model.head.weight = model.attention["query"].weight
    plan = {"head": RowwiseParallel(), "attention.query": ColwiseParallel()}
    refuse(plan, "head.weight", "attention.query.weight", "Shard(dim=1)", model=model)


def test_no_plan(tp4: DeviceMesh) -> None:
    with pytest.raises(
        UsageError, match=r"an empty parallelize_plan, so nothing would"
    ):
        parallelize_module(nn.Linear(8, 8), tp4, {})
    with pytest.raises(UsageError, match=r"no parallelize_plan"):
        parallelize_module(nn.Linear(8, 8), tp4)


def test_a_style_for_a_module_of_another_type(tp4: DeviceMesh) -> None:
    for style in (ColwiseParallel(), RowwiseParallel()):
        text = f"{type(style).__name__} currently only support nn.Linear and nn.Emb"
        with pytest.raises(NotImplementedError, match=text) as error:
            parallelize_module(nn.Conv1d(4, 4, 3), tp4, style)
        assert isinstance(error.value, SpmdError)
        assert "Conv1d" in str(error.value)


def test_a_module_with_two_styles(tp4: DeviceMesh) -> None:
    layer = parallelize_module(nn.Linear(8, 8), tp4, ColwiseParallel())
    with pytest.raises(LayoutError, match=r"weight, bias: already a DTensor"):
        parallelize_module(layer, tp4, RowwiseParallel())


def test_a_style_that_returns_another_module() -> None:
    class Replace(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return nn.Identity()

    with fake_mesh(4, ("tp",)) as mesh:
        with pytest.raises(
            LayoutError, match=r"'norm': Replace returned another module"
        ):
            parallelize_module(Model(), mesh, {"norm": Replace()})


# --- the layouts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: ColwiseParallel(input_layouts="tp"),
            "ColwiseParallel: input_layouts is 'tp'",
        ),
        (
            lambda: RowwiseParallel(output_layouts=Partial("avg")),
            "output_layouts is Partial",
        ),
        (lambda: SequenceParallel(sequence_dim=None), "sequence_dim is None"),
        (
            lambda: PrepareModuleInput(
                input_layouts=(1,), desired_input_layouts=(None,)
            ),
            "PrepareModuleInput: input_layouts is 1",
        ),
        (lambda: FusedColwiseParallel(parts=()), "pass the size of each part"),
        (
            lambda: FusedColwiseParallel(parts=(8, 8), num_heads=(2,)),
            "num_heads has 1 numbers for 2 parts",
        ),
        (
            lambda: FusedColwiseParallel(parts=(8, 9), num_heads=(2, 2)),
            r"parts \(8, 9\) do not divide into \(2, 2\) heads",
        ),
        (lambda: KeyValueParallel(num_heads=0), "num_heads is 0"),
        (lambda: ReplicateParallel(num_inputs=0), "num_inputs is 0"),
    ],
)
def test_layouts_that_are_none(build: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        build()


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: PrepareModuleInput(
                input_layouts=Shard(0), desired_input_layouts=(Replicate(), None)
            ),
            "input_layouts and desired_input_layouts should have same length! They have 1",
        ),
        (
            lambda: PrepareModuleInput(input_layouts=Shard(0)),
            "desired module inputs should not be None!",
        ),
        (
            lambda: PrepareModuleInput(
                input_kwarg_layouts={"x": Shard(0)},
                desired_input_kwarg_layouts={"y": Shard(0)},
            ),
            r"should have same length! They must have the same names: \['x'\] and \['y'\]",
        ),
        (
            lambda: PrepareModuleOutput(
                output_layouts=(Shard(0),), desired_output_layouts=(Shard(0), None)
            ),
            "output_layouts and desired_output_layouts should have same length!",
        ),
        (
            lambda: ExpertParallel(
                input_layouts=(Shard(0),), desired_input_layouts=(Shard(0), None)
            ),
            "input_layouts and desired_input_layouts should have same length!",
        ),
    ],
)
def test_lists_of_different_lengths(build: Any, text: str) -> None:
    for kind in (AssertionError, ValueError, SpmdError):
        with pytest.raises(kind, match=text):
            build()


def test_a_dimension_that_the_tensor_does_not_have(tp4: DeviceMesh) -> None:
    style = ColwiseParallel(output_layouts=Shard(3))
    layer = parallelize_module(nn.Linear(8, 8), tp4, style)
    text = r"output_layouts is Shard\(dim=3\), the tensor has 2 dim.*from -2 to 1"
    with pytest.raises(LayoutError, match=text):
        layer(torch.ones(2, 8))


# --- the inputs of a call -------------------------------------------------------------


def model_on(mesh: DeviceMesh, style: ParallelStyle) -> nn.Module:
    return parallelize_module(Model(), mesh, {"attention.query": style})


def test_a_sharded_input_for_a_layer_that_takes_it_whole(tp4: DeviceMesh) -> None:
    model = model_on(tp4, ColwiseParallel())
    with pytest.raises(LayoutError) as error:
        model.attention["query"](torch.ones(3, 2))
    assert str(error.value) == (
        "'attention.query' with ColwiseParallel on the mesh tp=4: the input is a "
        "tensor of shape (3, 2) and is taken as Replicate(); its last dimension must "
        "then be 8 on this rank (of 8 in all), not 2. It looks sharded: use "
        "input_layouts=Shard(-1)."
    )


def test_a_whole_input_for_a_layer_that_takes_a_shard(tp4: DeviceMesh) -> None:
    model = model_on(tp4, RowwiseParallel())
    text = r"'attention.query' with RowwiseParallel on the mesh tp=4.*It looks whole"
    with pytest.raises(LayoutError, match=text):
        model.attention["query"](torch.ones(3, 8))
    with pytest.raises(LayoutError, match=r"Pass the output of the layer before it"):
        model.attention["query"](torch.ones(3, 5))


@pytest.mark.parametrize(
    ("layer", "style"),
    [
        (nn.Linear(8, 8), ColwiseParallel()),
        (nn.Embedding(8, 8), ColwiseParallel()),
        (nn.LayerNorm(8), SequenceParallel()),
        (nn.Linear(8, 8), FusedColwiseParallel(parts=(4, 4))),
        (nn.Identity(), SequenceParallel()),
    ],
    ids=str,
)
def test_an_input_that_is_no_tensor(
    tp4: DeviceMesh, layer: nn.Module, style: ParallelStyle
) -> None:
    parallel = parallelize_module(copy.deepcopy(layer), tp4, style)
    with pytest.raises(
        LayoutError, match=r"to be a torch.Tensor or DTensor, but got a"
    ):
        parallel([1, 2])


def test_a_dtensor_of_another_mesh(dp2_tp4: DeviceMesh) -> None:
    layer = parallelize_module(nn.Linear(8, 8), dp2_tp4["tp"], ColwiseParallel())
    value = DTensor.from_local(torch.ones(2, 8), dp2_tp4["dp"], (Replicate(),))
    with pytest.raises(LayoutError, match=r"DTensor on the mesh dp=2.*the mesh tp=4"):
        layer(value)


def test_a_sequence_dimension_that_the_norm_reduces(tp4: DeviceMesh) -> None:
    norm = parallelize_module(nn.LayerNorm(8), tp4, SequenceParallel())
    with pytest.raises(LayoutError, match=r"sequence dimension 1 .* sequence_dim="):
        norm(torch.ones(3, 8))


def test_inputs_and_outputs_of_another_number(tp4: DeviceMesh) -> None:
    style = PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Replicate()
    )
    layer = parallelize_module(nn.Bilinear(2, 2, 2), tp4, style)
    text = "module inputs and input_layouts should have same length! the Bilinear on"
    with pytest.raises(ValueError, match=text):
        layer(torch.ones(2, 2), torch.ones(2, 2))
    out = PrepareModuleOutput(
        output_layouts=(Shard(0), None), desired_output_layouts=(Replicate(), None)
    )
    model = nn.ModuleDict({"last": nn.Identity()})
    parallelize_module(model, tp4, {"last": out})
    text = "module outputs and output_layouts should have same length! 'last' on the"
    with pytest.raises(ValueError, match=text):
        model["last"](torch.ones(2))


def test_an_argument_of_prepare_that_is_no_tensor(tp4: DeviceMesh) -> None:
    style = PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Replicate()
    )
    layer = parallelize_module(nn.Identity(), tp4, style)
    text = "input 0 is a int; expecting input to be a torch.Tensor! Write None"
    with pytest.raises(LayoutError, match=text):
        layer(3)


def test_a_second_derivative(tp4: DeviceMesh) -> None:
    layer = parallelize_module(nn.Linear(8, 8), tp4, ColwiseParallel())
    value = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(UsageError, match=r"create_graph=True.*differentiated again"):
        torch.autograd.grad(layer(value).sum(), value, create_graph=True)


def test_a_module_that_hides_its_layout() -> None:
    class Lose(nn.Module):
        def forward(self, x: torch.Tensor) -> float:
            return 1.0

    with fake_mesh(4, ("tp",)) as mesh:
        layer = parallelize_module(Lose(), mesh, SequenceParallel())
        with pytest.raises(
            LayoutError, match=r"Lose.forward returned a float, not a DT"
        ):
            layer(torch.ones(2, 3, 8))


# --- hard layouts ---------------------------------------------------------------------


def test_parts_that_do_not_add_up() -> None:
    refuse(
        {"attention.query": FusedColwiseParallel(parts=(8, 4))},
        "the parts (8, 4) add up to 12, the layer has 16 output features",
    )


def test_heads_that_the_ranks_cannot_share() -> None:
    text = "part 0 has 3 heads for 4 ranks; one number must divide the other"
    with fake_mesh(4, ("tp",)) as mesh:
        style = KeyValueParallel(num_heads=3)
        with pytest.raises(LayoutError, match=text):
            parallelize_module(nn.Linear(8, 6), mesh, style)
        with pytest.raises(
            LayoutError, match=r"7 output features do not divide into 3"
        ):
            parallelize_module(nn.Linear(8, 7), mesh, style)
        with pytest.raises(
            LayoutError, match=r"only supports nn.Linear; this is a LayerN"
        ):
            parallelize_module(nn.LayerNorm(8), mesh, style)


def test_a_saved_parameter_of_another_size(tp4: DeviceMesh) -> None:
    style = FusedColwiseParallel(parts=(8, 8))
    layer = parallelize_module(nn.Linear(8, 16), tp4, style)
    with pytest.raises(LayoutError, match=r"saved weight has 4 rows, the layer has 16"):
        layer.load_state_dict({"weight": torch.ones(4, 8), "bias": torch.ones(16)})


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(4, 8, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return x if x.ndim == 1 else (x,)


def test_experts_with_other_parameters_or_results(tp4: DeviceMesh) -> None:
    style = ExpertParallel(parameter_placements={"down": Shard(0)})
    with pytest.raises(LayoutError, match=r"no parameter 'down'"):
        parallelize_module(Stack(), tp4, style)
    stack = parallelize_module(Stack(), tp4, ExpertParallel())
    with pytest.raises(LayoutError, match=r"returned a tuple; it must return one"):
        stack(torch.ones(2, 8))
    with pytest.raises(ValueError, match=r"2 positional inputs for 1 layouts"):
        stack(torch.ones(2, 8), 3)
    with pytest.raises(LayoutError, match=r"input 0 is a int; write None"):
        stack(3)
