"""Drawn meshes, layouts, sizes and functions, all against one device."""

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from layouts import S0, S1, P, R, all_gather, leaf_of_terms
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from torchspmd.local import local_map

# How the ranks of one axis share the product of x (rows, inner) and w (inner, columns):
# layouts of x, w, the bias, and of the result.
WAYS = {
    "same": (R, R, R, R),
    "rows": (S0, R, R, S0),
    "columns": (R, S1, S0, S1),
    "inner": (S1, S0, None, P),
    "inner, reduced": (S1, S0, None, R),
    "rows, gathered": (S0, R, R, R),
    "terms": (P, R, None, P),
    "terms, reduced": (P, R, None, R),
}


@dataclass(frozen=True)
class Case:
    """One call; everything in it pickles."""

    mesh: tuple[int, ...]
    ways: tuple[str, ...]
    sizes: tuple[int, int, int]
    activation: bool
    nested: bool
    redistribute: bool
    has_bias_grad: bool


@st.composite
def cases(draw: Any, mesh: tuple[int, ...]) -> Case:
    ways = tuple(draw(st.sampled_from(sorted(WAYS))) for _ in mesh)
    if ways == ("rows, gathered", "rows"):
        ways = ways[::-1]  # an outer axis cannot be put together before the inner one
    world = 1
    for size in mesh:
        world *= size
    # A gather inside needs equal pieces; everything else takes any size.
    is_even = any("gathered" in way for way in ways)
    dims = st.integers(1, 3).map(lambda n: n * world) if is_even else st.integers(1, 9)
    return Case(
        mesh,
        ways,
        (draw(dims), draw(dims), draw(dims)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
    )


def single(x, w, bias, activation):
    y = x @ w
    y = y if bias is None else y + bias
    return torch.nn.functional.silu(y) if activation else y


def make_body(case, mesh, activation):
    def body(x, w, bias):
        y = x @ w
        for axis, way in enumerate(case.ways):
            group = mesh.get_group(axis)
            if "reduced" in way:
                y = funcol.all_reduce(y, "sum", group)
        y = y if bias is None else y + bias
        y = torch.nn.functional.silu(y) if activation else y
        # The last axis cuts inside the others, so it is put together first.
        for axis, way in reversed(list(enumerate(case.ways))):
            if "gathered" in way:
                y = all_gather(y, 0, mesh.get_group(axis))
        return y

    return body


@functools.cache
def make_mesh(sizes):
    """One mesh for all cases: a mesh of real ranks takes longer than a case."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def run_case(case):
    mesh = make_mesh(case.mesh)
    chosen = [WAYS[way] for way in case.ways]
    x_layout, w_layout, b_layout, out = (
        list(entries) for entries in zip(*chosen, strict=True)
    )
    # A partial result is linear in everything, so no bias and no activation.
    is_linear = any(way in ("inner", "terms") for way in case.ways)
    has_bias = not is_linear and None not in b_layout
    activation = case.activation and not is_linear
    torch.manual_seed(0)
    rows, inner, columns = case.sizes
    fulls = [
        torch.randn(rows, inner),
        torch.randn(inner, columns),
        torch.randn(columns),
    ]
    fulls = [f.double().requires_grad_() for f in fulls[: 3 if has_bias else 2]]
    expected = single(*fulls, *([] if has_bias else [None]), activation)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()

    layouts = [x_layout, w_layout, b_layout][: len(fulls)]
    start = layouts
    if case.redistribute:
        start = [
            [R if not entry.is_partial() else entry for entry in layout]
            for layout in layouts
        ]
    tensors = [
        leaf_of_terms(f.detach(), mesh, la) for f, la in zip(fulls, start, strict=True)
    ]
    if has_bias and not case.has_bias_grad:
        tensors[2].requires_grad_(False)
    body = make_body(case, mesh, activation)
    given_args = [*tensors, *([] if has_bias else [None])]
    specs = [*layouts, *([] if has_bias else [None])]
    options = {"redistribute_inputs": case.redistribute, "check": True}
    if case.nested:
        nested = local_map(
            lambda args: {"y": body(*args)}, {"y": out}, (tuple(specs),), **options
        )
        result = nested(tuple(given_args))["y"]
    else:
        result = local_map(body, out, tuple(specs), **options)(*given_args)
    assert result.placements == tuple(out)
    assert result.shape == expected.shape
    # Sharded results of other layouts cost DTensor a redistribution here, not us.
    w = distribute_tensor(weight, mesh, [R] * mesh.ndim, src_data_rank=None)
    (result * w).sum().full_tensor().backward()
    torch.testing.assert_close(result.full_tensor(), expected)
    for index, (tensor, full) in enumerate(zip(tensors, fulls, strict=True)):
        if tensor.requires_grad:
            torch.testing.assert_close(
                tensor.grad.full_tensor(), full.grad, msg=lambda m, i=index: f"{i}: {m}"
            )


def run_cases(batch):
    for case in batch:
        try:
            run_case(case)
        except Exception as error:
            raise AssertionError(f"{case}") from error


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
def test_drawn_calls(mesh: tuple[int, ...], request: pytest.FixtureRequest) -> None:
    world = mesh[0] if len(mesh) == 1 else 4
    ranks = request.getfixturevalue(f"ranks{world}")

    # A failure ends the ranks, so it is reported as drawn instead of being made smaller.
    @settings(
        max_examples=10,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
    )
    @given(st.lists(cases(mesh), min_size=4, max_size=8))
    def check(batch: list[Case]) -> None:
        ranks.run(run_cases, batch, timeout=120)

    check()
