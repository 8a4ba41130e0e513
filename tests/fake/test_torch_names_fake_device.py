"""Each private torch name behind tensors without memory; see test_torch_names.py."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from torchspmd import _torch
from torchspmd.errors import UsageError
from torchspmd.testing import fake_mesh, fake_world


@contextlib.contextmanager
def presented(seen=None, resized=None):
    def on_operator(func, args, kwargs, run):
        if seen is not None:
            seen.append(str(func))
        return run()

    mode = _torch.FakeDeviceMode(on_operator)
    shown = _torch.ShownAsCuda(lambda call, tensor: call, lambda tensor, stream: None)
    noted = (lambda *each: resized.append(each)) if resized is not None else print
    with _torch.fake_device(mode, shown, noted):
        yield


def test_fake_device():
    seen = []
    with presented(seen):
        weight = torch.empty(4, 4).to("cuda").requires_grad_()
        (weight @ weight).sum().backward()
        assert weight.grad.device == torch.device("cuda", 0)
        assert weight.grad.is_cuda
        assert weight.to("cuda") is weight
    assert "aten.mm.default" in seen
    assert "device" not in vars(torch.Tensor)


def test_in_another_thread():
    mode = _torch.FakeDeviceMode(lambda func, args, kwargs, run: run())
    shown = _torch.ShownAsCuda(lambda call, tensor: call, lambda tensor, stream: None)

    def make():
        with _torch.in_another_thread(mode, shown):
            return torch.empty(2, device="cuda")

    with _torch.fake_device(mode, shown, print), ThreadPoolExecutor(1) as pool:
        tensor = pool.submit(make).result()
        assert (tensor + torch.empty(2, device="cuda")).is_cuda
        with pytest.raises((AssertionError, RuntimeError)):  # of a torch without CUDA
            pool.submit(lambda: torch.empty(2, device="cuda")).result()


def test_fake_device_refuses_attention_of_jagged_tensors():
    with presented():
        layout = {"layout": torch.jagged, "device": "cuda"}
        rows = torch.nested.nested_tensor([torch.ones(2, 2, 8)], **layout)
        heads = rows.transpose(1, 2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            with pytest.raises(UsageError, match="cannot be rehearsed: its kernels"):
                F.scaled_dot_product_attention(heads, heads, heads)


def test_is_rehearsed():
    with presented():
        assert _torch.is_rehearsed(torch.empty(2).to("cuda"))
    with FakeTensorMode():
        assert not _torch.is_rehearsed(torch.empty(2))
    assert not _torch.is_rehearsed(torch.empty(2))


def test_fused_updates_without_values():
    with FakeTensorMode(), _torch.fused_updates_without_values():
        layer = nn.Linear(2, 2)
        layer(torch.ones(1, 2)).sum().backward()
        for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad):
            kind(layer.parameters(), fused=True).step()


def test_fake_device_tells_of_resized_memory():
    resized = []
    with presented(resized=resized):
        tensor = torch.empty(8).to("cuda:0")
        tensor.untyped_storage().resize_(0)
    assert [nbytes for _, nbytes in resized] == [0]


def test_fake_device_remembers_no_wrong_layout():
    with presented():
        for rows in (2, 3, 2):
            tensor = torch.empty(4, rows).to("cuda:0")
            assert tensor.t().shape == (rows, 4)
            assert (tensor + 1).shape == (4, rows)
            assert tensor[1:].t().storage_offset() == rows
            assert tensor.mul_(2) is not None


def test_is_device_tensor():
    with presented():
        assert _torch.is_device_tensor(torch.empty(2).to("cuda"))
        assert not _torch.is_device_tensor(torch.empty(2))


def test_is_fake_tensor():
    with presented():
        assert _torch.is_fake_tensor(torch.empty(2).to("cuda"))
        assert not _torch.is_fake_tensor(torch.empty(2))


def test_plain_tensors():
    with fake_mesh(2, ("dp",)) as mesh, presented():
        tensor = torch.empty(4, 4).to("cuda")
        assert list(_torch.plain_tensors(tensor)) == [tensor]
        spread = torch.distributed.tensor.DTensor.from_local(tensor, mesh)
        (local,) = _torch.plain_tensors(spread)
        assert _torch.is_fake_tensor(local) and local.shape == (4, 4)
    assert list(_torch.plain_tensors("no tensor")) == []


def test_dynamic_sizes():
    with torch.library._scoped_library("torchspmd_test", "DEF") as library:
        library.define("chosen(Tensor x) -> Tensor")

        def shape(x):
            return x.new_empty(torch.library.get_ctx().new_dynamic_size())

        torch.library.register_fake("torchspmd_test::chosen", shape, lib=library)
        with presented(), _torch.dynamic_sizes(3) as asked:
            result = torch.ops.torchspmd_test.chosen(torch.empty(5).to("cuda"))
            assert (result.shape, asked) == ((3,), [3])


def test_files_loaded(tmp_path):
    torch.save({"here": torch.arange(3)}, tmp_path / "file")
    plain = torch.load
    with _torch.files_loaded(), presented():
        assert torch.load(tmp_path / "file")["here"].tolist() == [0, 1, 2]
        moved = torch.load(tmp_path / "file", "cuda")["here"]
        assert (str(moved.device), moved.shape) == ("cuda:0", (3,))
    assert torch.load is plain


def test_optimizer_states_on_all_ranks(monkeypatch):
    from torch.distributed.fsdp import _optim_utils

    def gather(found, given, group=None):
        found[:] = [given] * len(found)

    monkeypatch.setattr(dist, "all_gather_object", gather)
    parameter = nn.Parameter(torch.ones(2))
    for rank in range(2):
        with fake_world(2, rank=rank), _torch.optimizer_states_on_all_ranks():
            (key,), local = _optim_utils._map_param_key_to_optim_keys(
                {"state": {0: {}}}, None, {0: parameter}, {parameter: ["weight"]}, {}
            )
            assert key.unflat_param_names == ("weight",)
            assert local == {key: 0}
    with fake_world(2, rank=1), _torch.optimizer_states_on_all_ranks():
        with pytest.raises(UsageError, match="only rank 1 is rehearsed here"):
            _optim_utils._broadcast_processed_state(None, {}, None)


def test_own_chunks_only():
    seen = []
    with fake_mesh(64, ("dp",)) as mesh:
        with _torch.own_chunks_only(), presented(seen):
            layer = nn.Linear(128, 128)
            fully_shard(layer, mesh=mesh)
        assert layer.weight.to_local().shape == (2, 128)
    assert len(seen) < 64


def test_shapes_apart():
    with fake_mesh(2, ("dp",)) as mesh:
        seen = []
        with _torch.shapes_apart(), presented(seen):
            whole = torch.empty(4, 4)
            torch.distributed.tensor.distribute_tensor(whole, mesh).relu()
        assert "aten.empty_strided.default" not in seen


def test_ddp_without_values():
    with fake_world(2), _torch.ddp_on_fake_groups(), _torch.ddp_without_values():
        with presented():
            model = DistributedDataParallel(nn.Linear(4, 4).to("cuda"))
            model(torch.empty(2, 4).to("cuda")).sum().backward()
        assert model.module.weight.grad is not None
        assert dist.is_initialized()


def test_after_each_backward():
    done = []
    with _torch.after_each_backward(lambda: done.append(1)):
        torch.ones(2, requires_grad=True).sum().backward()
    torch.ones(2, requires_grad=True).sum().backward()
    assert done == [1]


def test_find_overload():
    assert _torch.find_overload("pow.Scalar") is torch.ops.aten.pow.Scalar
    assert _torch.find_overload("no_such_operator") is None


def test_library_name():
    assert _torch.library_name(torch.ops.aten.sum.dim_IntList) == "sum.dim_IntList"
    assert _torch.library_name(torch.ops.aten.exp.default) == "exp"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_remove_library():
    library = torch.library.Library("aten", "IMPL", "AutogradCPU")
    library.impl("dropout", lambda input, p, train: input + 1)
    try:
        assert torch.dropout(torch.zeros(1), 0.5, True).item() == 1
    finally:
        _torch.remove_library(library)
    assert torch.dropout(torch.zeros(1), 0.5, True).item() == 0


def test_no_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with _torch.no_autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_below_autograd():
    with _torch.below_autograd():
        assert not torch.ones(2, requires_grad=True).exp().requires_grad


def test_autocast_names():
    cpu, cuda = _torch.autocast_names("cpu"), _torch.autocast_names("cuda")
    assert "mm" in cpu & cuda
    assert "cross_entropy_loss" in cpu - cuda
    assert "softmax.int" in cuda - cpu


def test_stages_like_this_one():
    from torch.distributed.pipelining import PipelineStage

    names = ("_recv_meta", "_warmup_forward_vote", "_warmup_backward_result")
    before = [getattr(PipelineStage, name, None) for name in names]
    with _torch.stages_like_this_one():
        inside = [getattr(PipelineStage, name, None) for name in names]
    assert before == [getattr(PipelineStage, name, None) for name in names]
    # torch 2.11 has none of them.
    assert (inside == before) == (before == [None] * len(names))


@pytest.fixture
def fake():
    with FakeTensorMode():
        return torch.empty(4, dtype=torch.int64)


def test_may_follow():
    assert _torch.may_follow(torch.arange(4))
    assert not _torch.may_follow(torch.ones(4, dtype=torch.complex64))
    assert _torch.may_follow(torch.ones(()).expand(1 << 21))
    assert not _torch.may_follow(torch.ones(()).expand(1 << 22))


def test_is_worth_following():
    assert _torch.is_worth_following(torch.arange(4))
    assert not _torch.is_worth_following(torch.arange(4, device="meta"))
    assert _torch.is_worth_following(torch.ones(4))  # a few are
    many = torch.ones(1 << 14)
    assert not _torch.is_worth_following(many)
    assert _torch.is_worth_following(many.masked_fill(many > 0, -torch.inf))


def test_known_tensor(fake):
    assert _torch.known_tensor(fake) is None


def test_set_known(fake):
    _torch.set_known(fake, real := torch.arange(4))
    assert _torch.known_tensor(fake) is real
    with fake.fake_mode:
        fake.add_(1)
    assert _torch.known_tensor(fake) is None  # it was written


def test_followed(fake):
    assert _torch.followed(fake) is None
    _torch.set_known(fake, real := torch.arange(4), "as it may be")
    assert _torch.followed(fake) == _torch.Known(real, "as it may be")
    assert _torch.known_tensor(fake) is None  # it is assumed


def test_forget_known(fake):
    _torch.set_known(fake, torch.arange(4))
    _torch.forget_known(fake)
    assert _torch.followed(fake) is None


def test_hand_on_known(fake):
    with fake.fake_mode:
        other = torch.empty(4, dtype=torch.int64)
    _torch.hand_on_known(fake, other)
    assert _torch.followed(other) is None
    _torch.set_known(fake, torch.arange(4), "as it may be")
    _torch.hand_on_known(fake, other)
    assert _torch.followed(other) == _torch.followed(fake)


def test_follow_operator(fake):
    with fake.fake_mode:
        more, part = fake + 1, fake[:2]
    add, cut = torch.ops.aten.add.Tensor, torch.ops.aten.slice.Tensor
    assert not _torch.follow_operator(add, (fake, 1), {}, (more,))
    _torch.set_known(fake, torch.arange(4), "as it may be")
    assert _torch.follow_operator(add, (fake, 1), {}, (more,))
    assert _torch.followed(more).real.tolist() == [1, 2, 3, 4]
    assert _torch.followed(more).why == "as it may be"
    assert not _torch.follow_operator(cut, (fake, 0, 0, 3), {}, (part,))  # other shape
    assert _torch.follow_operator(cut, (fake, 0, 0, 2), {}, (part,))


def test_write_known(fake):
    _torch.set_known(fake, torch.arange(4))
    with fake.fake_mode:
        part = fake[:2]
    cut, add = torch.ops.aten.slice.Tensor, torch.ops.aten.add_.Tensor
    _torch.follow_operator(cut, (fake, 0, 0, 2), {}, (part,))
    _torch.write_known(add, (part, 5), {})
    with fake.fake_mode:
        part.add_(5)
    assert _torch.known_tensor(fake).tolist() == [5, 6, 2, 3]
    with fake.fake_mode:
        unknown = torch.empty(4, dtype=torch.int64)
    _torch.write_known(add, (fake, unknown), {})
    assert _torch.followed(fake) is None
    assert _torch.followed(part) is None


def test_compute_known(fake):
    compute, add = _torch.compute_known, torch.ops.aten.add.Tensor
    assert compute(add, (fake, 1), {}) is None
    _torch.set_known(fake, torch.arange(4))
    assert compute(add, (fake, 1), {}).real[0].tolist() == [1, 2, 3, 4]
    assert compute(torch.ops.aten.add_.Tensor, (fake, 1), {}) is None
    assert compute(torch.ops.aten.randint.default, (4, [2]), {}) is None


@pytest.mark.parametrize("what", ["matmul", "convolution"])
def test_allows_tf32(what):
    owner = torch.backends.cuda.matmul if what == "matmul" else torch.backends.cudnn
    before = owner.allow_tf32
    try:
        for allowed in (True, False):
            owner.allow_tf32 = allowed
            assert _torch.allows_tf32(what) == allowed
    finally:
        owner.allow_tf32 = before
