"""Every refusal, by its text. Refusals of gradients on real ranks are with the reports."""

from typing import Any

import pytest
import torch
from layouts import S0, S1, P, R, put
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from torchspmd import SpmdError
from torchspmd.errors import LayoutError, UsageError
from torchspmd.local import local_map
from torchspmd.testing import fake_mesh


def attend(q: Any, k: Any) -> Any:
    return q @ k


def refusal(mapped: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(LayoutError) as caught:
        mapped(*args, **kwargs)
    assert isinstance(caught.value, SpmdError)
    assert isinstance(caught.value, ValueError)
    text = str(caught.value)
    assert "tensor([" not in text  # values are large, slow to fetch, and private
    assert text.startswith("local_map on 'attend': ")
    return text


def test_the_shape_of_a_message(dp2_tp4: Any) -> None:
    q = put(torch.ones(8, 8), dp2_tp4, R, S1)
    k = put(torch.ones(8, 8), dp2_tp4, R, S1)
    mapped = local_map(attend, [R, P], ([R, S0], [R, S0]))
    assert refusal(mapped, q, k) == (
        "local_map on 'attend': layouts do not match (mesh dp=2, tp=4)\n"
        "\n"
        "  * args[0] 'q': has [Replicate(), Shard(1)]; in_placements[0] asks "
        "[Replicate(), Shard(0)]\n"
        "  * args[1] 'k': has [Replicate(), Shard(1)]; in_placements[1] asks "
        "[Replicate(), Shard(0)]\n"
        "\n"
        "Each argument must have the layout of its entry in in_placements.\n"
        "If the arguments are to be redistributed, set redistribute_inputs=True; or "
        "write in_placements[0] = [Replicate(), Shard(1)].\n"
        "If the arguments are to be redistributed, set redistribute_inputs=True; or "
        "write in_placements[1] = [Replicate(), Shard(1)]."
    )


def test_redistribution_to_partial(tp2: Any) -> None:
    q = put(torch.ones(4, 4), tp2, R)
    mapped = local_map(attend, [P], ([P], None), redistribute_inputs=True)
    assert "Nothing can be redistributed to Partial(): write in_placements[0] = " in (
        refusal(mapped, q, q)
    )


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (([S0],), "in_placements has 1 entry for 2 arguments (2 leaves)"),
        (([S0],) * 3, "in_placements has 3 entries for 2 arguments (2 leaves)"),
        (([R], ([R], [R])), "in_placements[1] is a tuple of 2, but one tensor is"),
        ((R, [R]), "in_placements[0] is Replicate(), but one tensor is there"),
        (
            {"q": [R], "kk": [R]},
            "in_placements['kk'] = [Replicate()]: there is nothing",
        ),
        (
            ([R], [R, R]),
            "in_placements[1] = [Replicate(), Replicate()] has 2 entries for 1",
        ),
        (
            ([R], [Shard(2)]),
            "in_placements[1] = [Shard(2)] shards dim 2 of a tensor of 2",
        ),
        ("tp", "in_placements is a str, not a tuple or dict of layouts"),
    ],
)
def test_specs_that_do_not_fit(tp2: Any, spec: Any, text: str) -> None:
    q = put(torch.ones(4, 4), tp2, R)
    assert text in refusal(local_map(attend, [R], spec), q, q)


def test_trees_that_do_not_fit(tp2: Any) -> None:
    q = put(torch.ones(4, 4), tp2, R)
    mapped = local_map(attend, [R], ({"a": [R]}, None))
    assert "in_placements[0] has no entry for 'b'" in refusal(mapped, {"b": q}, q)
    mapped = local_map(attend, [R], ([[R], [R]], None))
    text = refusal(mapped, [q], q)
    assert "in_placements[0][1] = [Replicate()]: there is nothing at that place" in text


def test_a_layout_for_something_that_is_no_tensor(tp2: Any) -> None:
    q = put(torch.ones(4, 4), tp2, R)
    text = refusal(local_map(attend, [R], ([R], [R])), q, 3)
    assert "args[1] 'k': is of type int; in_placements[1] asks [Replicate()]" in text
    assert "Write in_placements[1] = None: only tensors have a layout." in text


def test_two_meshes(tp4: Any) -> None:
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    q, k = put(torch.ones(4, 4), tp4, R), put(torch.ones(4, 4), other, R, R)
    text = refusal(local_map(attend, [R]), q, k)
    assert "arguments are on two meshes (mesh tp=4)" in text
    assert "args[1] 'k': is on mesh (dp=2, tp=2)" in text
    text = refusal(local_map(attend, [R], device_mesh=other), q, k)
    assert "args[0] 'q': is on mesh (tp=4)" in text


def test_axes() -> None:
    with pytest.raises(UsageError, match=r"pass a tuple of mesh axis names, as in"):
        local_map(attend, [R], axes="tp")
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        q = put(torch.ones(4, 4), mesh, R, R)
        text = refusal(local_map(attend, [R], axes=("cp",)), q, q)
        assert "the mesh has no axis 'cp'" in text
        assert "Choose among: dp, tp." in text

        mapped = local_map(lambda q, k: torch.ones(2), [R], axes=("tp",))
        with pytest.raises(
            LayoutError, match="is not a DTensor over 'dp', the axes that"
        ):
            mapped(q, q)


def test_pieces_of_pieces(dp2_tp2: Any) -> None:
    q = put(torch.ones(4, 4), dp2_tp2, S0, S0)
    k = put(torch.ones(4, 4), dp2_tp2, R, R)
    text = refusal(local_map(attend, [S0], ([S0], [R]), axes=("tp",)), q, k)
    crossed = "dim 0 is cut over 'dp', which is left alone, and its pieces again over"
    assert f"args[0] 'q': {crossed} 'tp'" in text
    assert "Cut that dim over one of the two axes only" in text
    q = put(torch.ones(4, 4), dp2_tp2, S0, R)
    text = refusal(local_map(attend, [S0], axes=("tp",)), q, k)
    assert f"output: {crossed} 'tp'" in text


def test_not_a_function() -> None:
    with pytest.raises(UsageError, match="the first argument is a list, no function"):
        local_map([S0])


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (None, "output: is a tensor of shape [4, 4]; out_placements has None"),
        (
            [R, R],
            "output: out_placements = [Replicate(), Replicate()] has 2 entries for 1",
        ),
        (
            [Shard(5)],
            "output: out_placements = [Shard(5)] shards dim 5 of a tensor of 2",
        ),
        (
            [Shard(5)],
            "A tensor without the dim that Shard names, such as a sum, is Partial() where "
            "each rank has a term of it, and Replicate() where all ranks have the same.",
        ),
        (([R], [R]), "out_placements is a tuple of 2, but one tensor is there"),
        (R, "out_placements is Replicate(), but one tensor is there"),
    ],
)
def test_outputs_that_do_not_fit(tp2: Any, out: Any, text: str) -> None:
    q = put(torch.ones(4, 4), tp2, R)
    assert text in refusal(local_map(attend, out), q, q)


def outputs_refusal(body: Any, out: Any, **options: Any) -> str:
    with fake_mesh(3, ("tp",)) as mesh:
        x = put(torch.ones(7, 4), mesh, S0).requires_grad_()
        with pytest.raises(LayoutError) as caught:
            local_map(body, out, **options)(x)
    return str(caught.value)


def test_several_outputs() -> None:
    text = outputs_refusal(lambda x: (x, x), ([S0],))
    assert "out_placements has 1 entry, none for number 1" in text
    text = outputs_refusal(lambda x: (x, 5), ([S0], [S0]))
    assert "output[1]: is of type int; out_placements asks [Shard(0)]" in text
    assert "Write None for output[1]: only tensors have a layout." in text
    text = outputs_refusal(lambda x: [x], [[S0], [S0]])
    assert "out_placements[1] = [Shard(0)]: there is nothing at that place" in text


def test_a_dtensor_comes_out(tp2: Any) -> None:
    x = put(torch.ones(4, 4), tp2, R)
    with pytest.raises(LayoutError, match="output: is a DTensor, not this rank's"):
        local_map(lambda a: x, [R])(x)


def test_sizes_that_do_not_follow() -> None:
    text = outputs_refusal(lambda x: x.repeat(2, 1), [S0])
    assert (
        "output: has [6, 4] here and is [Shard(0)]; its whole size is not known" in text
    )
    assert "(dim 0: 6 here, while a dim of 7 is split unevenly)" in text
    assert "Write the whole shape of output in out_shapes." in text
    text = outputs_refusal(lambda x: x.repeat(2, 1), [S0], out_shapes=(14, 4))
    assert (
        "out_shapes give it the whole shape [14, 4], this rank's part of which is"
        in text
    )
    assert "[5, 4]" in text
    text = outputs_refusal(lambda x: x, [S0], out_shapes=(7,))
    assert "the whole shape [7], which has 1 dim" in text
    with fake_mesh(3, ("tp",)) as mesh:
        x = put(torch.ones(7, 2), mesh, R)
        with pytest.raises(LayoutError, match="a dim of 7 is split unevenly"):
            local_map(lambda x: x[:3], [S0])(x)
        assert local_map(lambda x: x[:3], [S0], out_shapes=(7, 2))(x).shape == (7, 2)
        x, y = put(torch.ones(7, 2), mesh, S0), put(torch.ones(8, 2), mesh, S0)
        with pytest.raises(LayoutError, match="it may be any of 7 or 8"):
            local_map(lambda x, y: x, [S0])(x, y)


def test_gradient_layouts_of_another_shape(tp2: Any) -> None:
    q = put(torch.ones(4, 4), tp2, S0).requires_grad_()
    k = put(torch.ones(4, 4), tp2, R)
    text = refusal(local_map(attend, [S0], None, ([R], None)), q, k)
    assert "is sharded as [Shard(0)], and so is its gradient; [Replicate()] has" in text
    mapped = local_map(attend, [S0], out_grad_placements=[R])
    text = refusal(mapped, q, k)
    assert "output: out_grad_placements = [Replicate()] for [Shard(0)]" in text
    assert "Keep Shard entries as in out_placements" in text


def test_a_gradient_past_the_outputs() -> None:
    kept = []

    def body(x: Any) -> Any:
        kept.append(x * 2)
        return x.detach()

    with fake_mesh(2, ("tp",)) as mesh:
        x = put(torch.ones(4, 4), mesh, S0).requires_grad_()
        local_map(body, [S0])(x)
        with pytest.raises(
            LayoutError, match="through a tensor that did not leave the"
        ):
            kept[0].sum().backward()
