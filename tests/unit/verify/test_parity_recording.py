"""Recordings: what is written, what is refused, and that a part is never taken for all."""

import functools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchspmd.errors import RecordingError, UsageError
from torchspmd.verify import compare_recordings, record
from torchspmd.verify.parity.match import find_match, possible_layouts
from torchspmd.verify.recording.files import INITIAL, Key, Kind, load_recording
from torchspmd.verify.recording.layouts import Grid, cut, describe_layout, join, sketch


def train(folder, *, steps=2, lr=0.1, spoil=None, width=4, optimizer=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, width), nn.ReLU(inplace=True), nn.Linear(width, 2)
    )
    make = optimizer or functools.partial(torch.optim.SGD, lr=lr, momentum=0.9)
    optimizer = make(model.parameters())
    if spoil is not None:
        spoil(model)
    with record(folder, model, optimizer, **options) as recorder:
        for step in range(steps):
            torch.manual_seed(step)
            loss = model(torch.randn(6, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.end_step(loss)
    return folder


def test_two_runs_agree_bit_for_bit(tmp_path):
    first, second = train(tmp_path / "a"), train(tmp_path / "b")
    verdict = compare_recordings(first, second, tolerance="bitwise")
    assert verdict
    assert verdict.tolerance.is_bitwise
    assert verdict.compared["gradient of a parameter"] == 8
    assert "bitwise, as asked for" in str(verdict)


def test_what_is_recorded(tmp_path):
    recording = load_recording(train(tmp_path / "a"))
    assert recording.first.num_steps == 2
    initial = recording.read_step(INITIAL)[0]
    assert [key.name for key in initial] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    kinds = {key.kind for key in recording.read_step(1)[0]}
    assert kinds == set(Kind) - {Kind.OUTPUT, Kind.BUFFER}


def test_the_gradient_of_an_input_is_that_of_the_module_alone(tmp_path):
    """A tensor with two readers: each module's own share is kept."""
    x = torch.ones(1, 1, requires_grad=True)
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = model["a"], model["b"]

        def forward(self, x):
            return self.a(x) + self.b(x)

    both = Two()
    with record(tmp_path / "a", both) as recorder:
        loss = both(x * 1).sum()
        loss.backward()
        recorder.end_step(loss)
    pieces = load_recording(tmp_path / "a").read_step(0)[0]
    shares = [pieces[Key(Kind.GRAD_INPUT, name)].value for name in ("a", "b", "")]
    assert torch.equal(shares[0], both.a.weight)
    assert torch.equal(shares[1], both.b.weight)
    torch.testing.assert_close(shares[0] + shares[1], shares[2])


class Answer:
    def __init__(self, value):
        self.value = value


class Wrapped(nn.Linear):
    def forward(self, x):
        return Answer(super().forward(x))


def test_an_output_that_is_not_looked_into_is_told(tmp_path):
    model = Wrapped(2, 1)
    with record(tmp_path / "a", model) as recorder:
        loss = model(torch.ones(3, 2)).value.sum()
        loss.backward()
        recorder.end_step(loss)
    notes = load_recording(tmp_path / "a").first.notes
    assert notes == ("'the model' returns a Answer, which is not looked into",)


def test_hooks_are_gone_afterwards(tmp_path):
    model = nn.Linear(2, 2)
    with record(tmp_path / "a", model) as recorder:
        recorder.end_step(model(torch.ones(1, 2)).sum())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_large_tensor_is_kept_as_a_sketch(tmp_path):
    options = {"width": 3000, "max_bytes": 20_000}
    small = train(tmp_path / "a", **options)
    piece = load_recording(small).read_step(INITIAL)[0][Key(Kind.PARAMETER, "0.weight")]
    assert piece.is_sketch
    assert piece.value.numel() == 4096
    whole = train(tmp_path / "b", width=3000)
    assert compare_recordings(small, train(tmp_path / "c", **options))
    assert compare_recordings(whole, small)
    assert compare_recordings(small, whole)

    def spoil(model):
        with torch.no_grad():
            model[0].weight[7, 1] += 1.0

    other = train(tmp_path / "d", spoil=spoil, **options)
    verdict = compare_recordings(small, other)
    assert verdict.first is not None
    assert verdict.first.place == "0"


def test_another_learning_rate_is_named(tmp_path):
    verdict = compare_recordings(train(tmp_path / "a"), train(tmp_path / "b", lr=0.2))
    assert verdict.first.place == "(optimizer)"
    assert verdict.first.cause.code == "update-factor"
    assert "2 times as large" in str(verdict)


ADAM = functools.partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize("is_on_ranks", [True, False])
def test_amsgrad_on_one_side_only(tmp_path, is_on_ranks):
    """In the first steps the updates are the same; the states are not."""
    plain = train(tmp_path / "a", optimizer=ADAM, steps=1)
    amsgrad = functools.partial(ADAM, amsgrad=True)
    other = train(tmp_path / "b", optimizer=amsgrad, steps=1)
    sides = (plain, other) if is_on_ranks else (other, plain)
    verdict = compare_recordings(*sides)
    assert not verdict
    assert verdict.first.kind is Kind.STATE
    assert verdict.first.name.endswith(".max_exp_avg_sq")
    assert verdict.first.cause.code == ("extra" if is_on_ranks else "missing")
    assert len(verdict.differences) == 4


def test_a_recording_that_did_not_finish(tmp_path):
    with pytest.raises(KeyError), record(tmp_path / "a", nn.Linear(1, 1)):
        raise KeyError
    with pytest.raises(
        RecordingError, match=r"is not whole: rank 0 of 1 did not finish"
    ):
        load_recording(tmp_path / "a")


def test_a_step_without_its_end(tmp_path):
    model = nn.Linear(1, 1)
    with (
        pytest.raises(RecordingError, match=r"Call end_step\(loss\) once after each"),
        record(tmp_path / "a", model),
    ):
        model(torch.ones(1, 1))


def test_a_folder_is_not_written_twice(tmp_path):
    train(tmp_path / "a")
    with pytest.raises(RecordingError, match="holds a recording already"):
        train(tmp_path / "a")


def test_no_recording(tmp_path):
    with pytest.raises(RecordingError, match="holds no recording"):
        load_recording(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "is not part of a recording of torchspmd"),
        ({"version": 99}, "has recording version 99"),
        ({"ties": 3}, "has a broken entry"),
    ],
)
def test_a_broken_header(tmp_path, change, words):
    path = train(tmp_path / "a") / "rank0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RecordingError, match=words):
        load_recording(tmp_path / "a")


def test_a_broken_step(tmp_path):
    folder = train(tmp_path / "a")
    (folder / "rank0-step1.pt").write_bytes(b"something else")
    with pytest.raises(RecordingError, match=r"rank0-step1.pt cannot be read"):
        compare_recordings(folder, folder)


def test_another_number_of_steps(tmp_path):
    first, second = train(tmp_path / "a"), train(tmp_path / "b", steps=3)
    with pytest.raises(RecordingError, match="Record the same number of steps"):
        compare_recordings(first, second)


def test_arguments_are_checked(tmp_path):
    with pytest.raises(UsageError, match="choose 'mean' or 'sum'"):
        record(tmp_path, nn.Linear(1, 1), loss_reduction="max")
    with pytest.raises(UsageError, match=r"the mesh ranks=1 has no axis dp"):
        record(tmp_path, nn.Linear(1, 1), data_axes=("dp",))
    folder = train(tmp_path / "a")
    with pytest.raises(UsageError, match="give a number from 0 to 1"):
        compare_recordings(folder, folder, tolerance=7)


# ----------------------------------------------------------------------------
# Cutting and joining by DTensor's rules, without a process group.


GRID = Grid(("dp", "tp"), (2, 2), (0, 1, 2, 3))
PLACEMENTS = ("R", "S(0)", "S(1)", "_S(0, 2)", "_S(1, 3)")


def parts(whole, grid, layout):
    return {rank: cut(whole, grid, layout, rank) for rank in grid.ranks}


@st.composite
def laid_out(draw):
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    layout = tuple(draw(st.sampled_from(PLACEMENTS)) for _ in sizes)
    ranks = tuple(range(sizes[0] * (sizes[1] if len(sizes) > 1 else 1)))
    grid = Grid(("a", "b")[: len(sizes)], tuple(sizes), ranks)
    return torch.randn(shape, dtype=torch.float64), grid, layout


@settings(max_examples=150, deadline=None)
@given(laid_out())
def test_joining_the_parts_gives_the_whole(case):
    whole, grid, layout = case
    joined = join(parts(whole, grid, layout), grid, layout, tuple(whole.shape))
    assert joined is not None
    for rank in grid.ranks:
        assert torch.equal(joined[rank], whole)


@settings(max_examples=50, deadline=None)
@given(laid_out())
def test_sketches_of_parts_add_up_to_that_of_the_whole(case):
    whole, grid, layout = case
    found = [
        sketch(part, tuple(whole.shape), grid, layout, rank)
        for rank, part in parts(whole, grid, layout).items()
    ]
    copies = 1
    for size, text in zip(grid.shape, layout, strict=True):
        copies *= size if text == "R" else 1
    torch.testing.assert_close(
        torch.stack(found).sum(0) / copies, sketch(whole, tuple(whole.shape))
    )


def test_the_norm_of_a_sketch_is_close_to_that_of_the_tensor():
    value = torch.randn(300, 100, generator=torch.Generator().manual_seed(0))
    assert sketch(value, (300, 100)).norm().item() == pytest.approx(
        value.norm().item(), rel=0.05
    )


def test_terms_of_a_sum_are_added():
    whole = torch.arange(4.0)
    terms = {0: whole * 0.25, 1: whole * 0.75}
    grid = Grid(("tp",), (2,), (0, 1))
    for text, factor in (("P(sum)", 1.0), ("P(avg)", 0.5)):
        joined = join(terms, grid, (text,), (4,))
        assert torch.equal(joined[0], whole * factor)
    assert join(terms, grid, ("P(max)",), (4,)) is None


def test_replicas_that_differ_stay_different():
    grid = Grid(("tp",), (2,), (0, 1))
    joined = join({0: torch.zeros(2), 1: torch.ones(2)}, grid, ("R",), (2,))
    assert joined[0].sum() == 0
    assert joined[1].sum() == 2


def test_parts_of_the_wrong_shape_make_no_whole():
    grid = Grid(("tp",), (2,), (0, 1))
    halves = {0: torch.zeros(2), 1: torch.zeros(2)}
    assert join(halves, grid, ("S(0)",), (5,)) is None


def test_layouts_are_told_from_shapes():
    shapes = ((2, 3),) * 4
    assert possible_layouts(shapes, (4, 6), GRID)[:2] == (
        ("S(0)", "S(1)"),
        ("S(1)", "S(0)"),
    )
    assert possible_layouts(shapes, (2, 3), GRID) == (("R", "R"),)
    assert possible_layouts(shapes, (7, 3), GRID) == ()
    assert possible_layouts(shapes, (2, 3, 1), GRID) == ()


def test_of_two_possible_layouts_the_right_one_is_taken():
    whole = torch.randn(4, 6)
    layout = ("S(1)", "S(0)")
    values = [cut(whole, GRID, layout, rank) for rank in range(4)]
    match = find_match(values, whole, torch.tensor(1e-6), GRID)
    assert match is not None and match.agrees
    assert match.layout == layout
    assert describe_layout(GRID, layout) == "dp: Shard(1), tp: Shard(0)"


def test_fused_features_lie_in_blocks():
    whole = torch.randn(2, 12)
    grid = Grid(("tp",), (2,), (0, 1))
    values = [cut(whole, grid, ("_S(1, 3)",), rank) for rank in range(2)]
    match = find_match(values, whole, torch.tensor(0.0), grid)
    assert match is not None and match.agrees
    assert describe_layout(grid, match.layout) == "tp: Shard(1) in 3 blocks"
