"""Private names of torch behind in-place forms, loss scaling and backward contexts."""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.overrides import TorchFunctionMode

from torchspmd import _torch

pytestmark = pytest.mark.unit

aten = torch.ops.aten


def test_in_place_form():
    assert _torch.in_place_form(aten.add.Tensor) is aten.add_.Tensor
    assert _torch.in_place_form(aten.lerp.Scalar) is aten.lerp_.Scalar
    assert _torch.in_place_form(aten.copy.default) is aten.copy_.default
    assert _torch.in_place_form(aten._foreach_mul.Scalar) is aten._foreach_mul_.Scalar
    fused = _torch.in_place_form(aten._fused_adamw.tensor_lr)
    assert fused is aten._fused_adamw_.tensor_lr
    for other in (aten.add_.Tensor, aten.mm.default, aten.cumsum.default, len, None):
        assert _torch.in_place_form(other) is None


def test_written_arguments():
    assert _torch.written_arguments(aten.add_.Tensor) == (0,)
    assert _torch.written_arguments(aten.add.Tensor) == ()
    assert _torch.written_arguments(aten._fused_adam_.default) == (0, 1, 2, 3, 4)
    assert _torch.written_arguments(len) == ()


def test_shared_arguments():
    assert _torch.shared_arguments(aten.t.default) == (0,)
    assert _torch.shared_arguments(aten.split.Tensor) == (0,)
    assert _torch.shared_arguments(aten._unsafe_view.default) == (0,)
    wait = torch.ops._c10d_functional.wait_tensor.default
    assert _torch.shared_arguments(wait) == (0,)
    assert _torch.shared_arguments(aten.add.Tensor) == ()
    values, indices = 4, 5
    assert _torch.shared_arguments(aten.sort.values_stable) == (values, indices)
    assert _torch.shared_arguments(aten.sort.values_stable, 1) == (indices,)
    assert _torch.shared_arguments(aten.native_dropout.default, 0) == (0,)
    assert _torch.shared_arguments(aten.native_dropout.default, 1) == ()
    assert _torch.shared_arguments(aten.split.Tensor, 3) == (0,)


def test_gives_one_tensor():
    assert _torch.gives_one_tensor(aten.relu.default)
    for several in (aten.split.Tensor, aten.native_dropout.default):
        assert not _torch.gives_one_tensor(several)
    assert not _torch.gives_one_tensor(aten._foreach_add_.List)  # gives nothing


def test_tensor_methods():
    assert _torch.tensor_methods("t") == (aten.t.default,)
    assert aten.view.default in _torch.tensor_methods("view")
    for other in ("name", "no_such_method", "arange"):
        assert _torch.tensor_methods(other) == ()


def test_silent_views_really_share_memory():
    x = torch.ones(4, 4)
    assert aten._unsafe_view(x, [16]).data_ptr() == x.data_ptr()
    assert aten.unsafe_split(x, 2)[0].data_ptr() == x.data_ptr()
    assert aten.unsafe_split_with_sizes(x, [2, 2])[0].data_ptr() == x.data_ptr()
    assert aten.conj_physical(x).data_ptr() == x.data_ptr()
    assert aten.lift(x).data_ptr() == x.data_ptr()
    assert aten.relu(x).data_ptr() != x.data_ptr()


def test_storage_bytes():
    assert _torch.storage_bytes(torch.ones(8)[2:4]) == 32


def test_scaler_tensors():
    scaler = GradScaler("cpu")
    tensors = _torch.scaler_tensors(scaler, torch.device("cpu"))
    assert [t.item() for t in tensors.values()] == [65536.0, 0]
    assert set(tensors) <= set(vars(scaler))
    off = GradScaler("cpu", enabled=False)
    assert _torch.scaler_tensors(off, torch.device("cpu")) == {}


def test_scaler_facts():
    scaler = GradScaler("cpu", growth_interval=5)
    assert _torch.scaler_facts(scaler) == ("GradScaler", True, 2.0, 0.5, 5)


def test_choosing_steps():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu")
    calls = []
    with _torch.choosing_steps(scaler, lambda *args: calls.append(args)) as is_updated:
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        assert not is_updated()
        scaler.update()
        assert is_updated()
    ((stepped, found, make),) = calls
    assert stepped is optimizer and found.item() == 0.0
    assert parameter.tolist() == [1, 1]
    make()
    assert parameter.tolist() == [0, 0]
    assert "_maybe_opt_step" not in vars(scaler)


def test_backward_under():
    seen = []

    class Names(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def region(x):
        return x.sin().relu()

    leaf = torch.ones(2, requires_grad=True)
    with Names() as mode:
        out = torch.utils.checkpoint.checkpoint(region, leaf, use_reentrant=False).sum()
        with _torch.backward_under(mode):
            out.backward()
    assert seen.count("sin") == 2  # the recomputation is seen too


def test_hook_tables():
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(print)
    module.register_forward_hook(print)
    module.register_full_backward_pre_hook(print)
    module.register_full_backward_hook(print)
    for name in _torch.HOOK_TABLES:
        assert len(getattr(module, name)) == 1


def test_reduction_in_place():
    functional = torch.ops._c10d_functional
    form = _torch.reduction_in_place(functional.all_reduce.default)
    assert form is functional.all_reduce_.default
    assert _torch.written_arguments(form) == (0,)
    for other in (functional.reduce_scatter_tensor.default, aten.add.Tensor, None):
        assert _torch.reduction_in_place(other) is None


def test_update_operator():
    seen = []
    name = "a name of this test"
    call = _torch.update_operator(name, lambda *args: seen.append(args))
    weight = torch.ones(1)
    assert call(name, 3, [weight], []) is None
    (number, written, read) = seen[0]
    assert (number, list(read)) == (3, []) and written[0] is weight
