"""Common lines of scripts for GPUs, in a rehearsal and on a CPU; torch as it was after."""

import copy
import io
import os
import shutil
import sys
import threading
import types
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from torchspmd.errors import UsageError
from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import load_gpu
from torchspmd.predict.memory import count_memory
from torchspmd.predict.operators import Pricer
from torchspmd.predict.program import price_events
from torchspmd.predict.traffic import op_flops, recurrent_products
from torchspmd.rehearse.recording import (
    Comm,
    EventRecord,
    EventWait,
    MarkKind,
    Op,
    Phase,
    RecordStream,
    StreamWait,
    Synchronize,
    Wait,
)
from torchspmd.rehearse.values import NoValueError
from torchspmd.rehearse.window import StepWindow
from torchspmd.rehearse.world import EndOfWindow
from torchspmd.trace import CommDebugMode


def scaled():
    scaler = torch.amp.GradScaler("cuda")
    layer = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(torch.ones(2, 4, device="cuda")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return layer.weight.grad is not None


def on_a_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.ones(4, device="cuda")
    torch.cuda.current_stream().wait_stream(stream)
    tensor.record_stream(torch.cuda.current_stream())
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.wait(stream)
    event.synchronize()
    return event.elapsed_time(event) > 0


def seeded():
    torch.cuda.manual_seed_all(0)
    generator = torch.Generator(device="cuda").manual_seed(0)
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    return torch.randn(4, device="cuda", generator=generator).is_cuda


def tied():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    model.to("cuda")
    return model["b"].weight is model["a"].weight


def _with_default_device():
    with torch.device("cuda"):
        return nn.Linear(2, 2).weight.is_cuda and torch.tensor([1]).is_cuda


def _sync_batch_norm():
    dist.init_process_group("nccl")
    layer = nn.SyncBatchNorm(4).cuda()
    layer(torch.ones(2, 4, 3, device="cuda")).sum().backward()
    return layer.weight.grad is not None


def _default_device():
    torch.set_default_device("cuda")
    try:
        made = torch.rand(3), torch.tensor([1]), nn.Linear(2, 2).weight
        return all(each.is_cuda for each in (*made, torch.empty(2, device=None)))
    finally:
        torch.set_default_device(None)


def _default_type():
    torch.set_default_tensor_type("torch.cuda.HalfTensor")
    try:
        return torch.zeros(3).is_cuda and torch.zeros(3).dtype == torch.float16
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is a newer one
            torch.set_default_tensor_type("torch.FloatTensor")


def _new():
    tensor = torch.ones(2, device="cuda")
    made = tensor.new(3), tensor.new(tensor.shape), tensor.new([1.0]), tensor.new()
    shapes = [tuple(each.shape) for each in made]
    return shapes == [(3,), (2,), (1,), (0,)] and all(each.is_cuda for each in made)


def _normed():
    """Its weight is computed before the module is moved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a newer one
        layer = nn.utils.weight_norm(nn.Linear(4, 4)).cuda()
    layer(torch.ones(2, 4, device="cuda")).sum().backward()
    return layer.weight_g.is_cuda and layer.weight_g.grad is not None


class _Tagged(torch.Tensor):
    """As of a library that gives tensors a meaning."""


def _subclass():
    tagged = torch.ones(2, device="cuda").as_subclass(_Tagged) + 1
    return isinstance(tagged, _Tagged) and tagged.is_cuda


def _data_parallel():
    module = nn.DataParallel(nn.Linear(4, 4).cuda(), device_ids=[0])
    return module(torch.ones(2, 4)).is_cuda


def _saved_on_cpu():
    layer = nn.Linear(4, 4).cuda()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = layer(torch.ones(2, 4, device="cuda")).relu()
    y.sum().backward()
    return layer.weight.grad is not None


IDIOMS = {
    "new of a kind": _new,
    "legacy type": lambda: torch.cuda.FloatTensor(3, 4).fill_(0).is_cuda,
    "legacy data": lambda: torch.cuda.LongTensor([1, 2]).dtype == torch.int64,
    "legacy cast": lambda: torch.ones(2).type("torch.cuda.HalfTensor").is_cuda,
    "legacy instance": lambda: isinstance(
        torch.ones(2, device="cuda"), torch.cuda.FloatTensor
    ),
    "default device of all": _default_device,
    "default type": _default_type,
    "weight norm": _normed,
    "subclass": _subclass,
    "data parallel": _data_parallel,
    "saved on cpu": _saved_on_cpu,
    "generator": lambda: torch.Generator(device="cuda").device.type == "cuda",
    "stats": lambda: torch.cuda.memory_stats()["allocation.all.current"] == 0,
    "nested stats": lambda: (
        torch.cuda.memory_stats_as_nested_dict()["num_alloc_retries"] == 0
    ),
    "backend": lambda: torch.cuda.get_allocator_backend() == "native",
    "range": lambda: torch.cuda.nvtx.range_start("a") == 0,
    "accelerator's memory": lambda: torch.accelerator.memory_stats()["num_ooms"] == 0,
    "uuid": lambda: bool(torch.cuda.get_device_properties(0).uuid),
    "device": lambda: torch.ones(2, device="cuda").device == torch.device("cuda", 0),
    "to": lambda: torch.ones(2).to("cuda").is_cuda,
    "to an index": lambda: torch.ones(2).to(0).get_device() == 0,
    "cuda": lambda: torch.ones(2).cuda(0).is_cuda,
    "cpu": lambda: torch.ones(2, device="cuda").cpu().device.type == "cpu",
    "like": lambda: torch.zeros_like(torch.ones(2, device="cuda")).is_cuda,
    "new": lambda: torch.ones(2, device="cuda").new_zeros(3).is_cuda,
    "tensor": lambda: torch.tensor([1.0, 2.0], device="cuda").is_cuda,
    "default device": _with_default_device,
    "type": lambda: torch.ones(2, device="cuda").type() == "torch.cuda.FloatTensor",
    "module": lambda: next(nn.Linear(2, 2).cuda().parameters()).is_cuda,
    "tied": tied,
    "deepcopy": lambda: copy.deepcopy(nn.Linear(2, 2).cuda()).weight.is_cuda,
    "half": lambda: nn.Linear(2, 2).cuda().half().weight.dtype == torch.float16,
    "is_available": torch.cuda.is_available,
    "bf16": torch.cuda.is_bf16_supported,
    "name": lambda: torch.cuda.get_device_name(0) == "NVIDIA H100",
    "capability": lambda: torch.cuda.get_device_capability() == (9, 0),
    "properties": lambda: torch.cuda.get_device_properties(0).total_memory > 0,
    "memory": lambda: torch.cuda.max_memory_allocated() == 2048,
    "mem_get_info": lambda: torch.cuda.mem_get_info()[1] == 80 << 30,
    "summary": lambda: "allocated" in torch.cuda.memory_summary(),
    "synchronize": lambda: torch.cuda.synchronize() is None,
    "pin_memory": lambda: torch.ones(2).pin_memory().is_pinned(),
    "accelerator": lambda: torch.accelerator.current_accelerator().type == "cuda",
    "nvtx": lambda: torch.cuda.nvtx.range_push("a") == 0,
    "loader": lambda: (
        len(next(iter(DataLoader(torch.ones(8, 4), 2, pin_memory=True)))) == 2
    ),
    "scaler": scaled,
    "stream": on_a_stream,
    "random": seeded,
    "numpy": lambda: torch.ones(2, device="cuda").cpu().numpy().shape == (2,),
    "finite": lambda: not torch.isnan(torch.ones(2, device="cuda")).any(),
    "device by number": lambda: torch.device(1) == torch.device("cuda", 1),
    "address": lambda: torch.ones(1, device="cuda").untyped_storage().data_ptr() > 0,
    "isfinite": lambda: bool(torch.isfinite(torch.randn((), device="cuda"))),
    "isinf": lambda: not torch.randn(2, device="cuda").isinf().any(),
    "either": lambda: (
        not (
            torch.isnan(torch.randn((), device="cuda"))
            | torch.isinf(torch.randn((), device="cuda"))
        )
    ),
    "mask": lambda: (
        len(torch.ones(4, device="cuda")[torch.ones(4, device="cuda") > 0]) == 4
    ),
    "profiler": lambda: torch.profiler.profile().__enter__().step() is not None,
    "syncbn": _sync_batch_norm,
}


def _idiom(name):
    # Looked up by name inside: functions of torch.cuda are others there.
    return {
        "is_available": torch.cuda.is_available,
        "bf16": torch.cuda.is_bf16_supported,
    }.get(name, IDIOMS[name])


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom(rehearse, name):
    with rehearse(2):
        assert _idiom(name)()


# Tensors of a CPU say that they are, and memory is not counted there.
OTHERWISE_ON_CPU = {
    *("device", "to", "to an index", "cuda", "like", "new", "tensor"),
    *("default device", "default device of all", "default type"),
    *("new of a kind", "subclass", "data parallel"),
    *("legacy type", "legacy cast", "legacy instance", "weight norm"),
    *("type", "module", "deepcopy", "random", "memory"),
}


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_on_a_cpu(on_cpu, name):
    with on_cpu(2):
        assert bool(_idiom(name)()) == (name not in OTHERWISE_ON_CPU)


@pytest.mark.parametrize("where", ["rehearse", "on_cpu"])
def test_groups_of_any_backend_answer_at_once(request, where):
    with request.getfixturevalue(where)(8):
        dist.init_process_group("gloo")
        assert dist.get_backend() == "gloo"
        assert dist.is_nccl_available()
        assert dist.new_group([0, 3], backend="gloo").size() == 2


@pytest.mark.parametrize("where", ["rehearse", "on_cpu"])
def test_each_group_has_the_backend_that_was_asked_for(request, where):
    with request.getfixturevalue(where)(8):
        dist.init_process_group("nccl")
        side = dist.new_group(backend="gloo")
        assert dist.get_backend(side) == "gloo"
        assert dist.get_backend(dist.new_group([0, 1])) == "nccl"
        dist.monitored_barrier(group=side)  # of gloo alone


def test_what_a_reader_must_know_of_cuda_on_a_cpu(on_cpu):
    with on_cpu() as notes:
        torch.ones(2)
        torch.cuda.synchronize()
    assert notes == []
    with on_cpu() as notes:
        assert torch.ones(2, device="cuda").sum().item() == 2.0
        torch.cuda.max_memory_allocated()
        torch.profiler.profile()
    memory, profile, device = notes
    assert "asked for its memory: 0 bytes were given. `torchspmd predict`" in memory
    assert profile == "torch.profiler.profile: nothing is profiled"
    assert "The script's cuda was the CPU of this machine" in device
    assert device.endswith("With --fake the script sees a GPU.")


def ddp_of_a_gpu(device_ids):
    layers = nn.Linear(4, 4), nn.SyncBatchNorm(4)
    model = DistributedDataParallel(nn.Sequential(*layers).cuda(), device_ids)
    model(torch.ones(2, 4)).sum().backward()
    return model.device_type


@pytest.mark.parametrize("device_ids", [None, [0]])
def test_ddp_of_a_gpu_on_a_cpu(on_cpu, device_ids):
    with on_cpu(2):
        assert ddp_of_a_gpu(device_ids) == "cuda"


def test_ddp_of_a_cpu_stays_one(on_cpu):
    with on_cpu(2):
        assert DistributedDataParallel(nn.Linear(2, 2)).device_type == "cpu"
        with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor"):
            nn.SyncBatchNorm(4)(torch.ones(2, 4))


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2, 2)])
def test_sync_batch_norm_on_a_cpu_computes(on_cpu, shape):
    torch.manual_seed(0)
    plain = nn.BatchNorm1d(3) if len(shape) == 2 else nn.BatchNorm2d(3)
    nn.init.normal_(plain.weight)
    sync = copy.deepcopy(plain)
    batch = torch.randn(shape)
    one, other = batch.clone().requires_grad_(), batch.clone().requires_grad_()
    weights = torch.randn(shape)
    (plain(one) * weights).sum().backward()
    with on_cpu():  # one rank: all there is to gather
        out = SyncBatchNorm.apply(
            other,
            sync.weight,
            sync.bias,
            sync.running_mean,
            sync.running_var,
            sync.eps,
            sync.momentum,
            dist.group.WORLD,
            1,
        )
        (out * weights).sum().backward()
    pairs = [
        (one.grad, other.grad),
        (plain.weight.grad, sync.weight.grad),
        (plain.bias.grad, sync.bias.grad),
        (plain.running_mean, sync.running_mean),
        (plain.running_var, sync.running_var),
    ]
    for expected, found in pairs:
        torch.testing.assert_close(found, expected)


def test_autocast_on_a_cpu_has_the_lists_that_were_asked_for(on_cpu):
    def of_softmax(device):
        with torch.autocast(device, dtype=torch.bfloat16):
            y = torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)
            return F.softmax(y, -1).dtype

    with on_cpu():
        assert of_softmax("cpu") == torch.bfloat16
        assert of_softmax("cuda") == torch.float32
    assert of_softmax("cpu") == torch.bfloat16


@pytest.mark.parametrize(
    "location", [None, "cuda", torch.device("cuda", 0), {"cpu": "cuda:0"}]
)
def test_checkpoints_for_a_gpu_are_loaded_on_a_cpu(on_cpu, location):
    buffer = io.BytesIO()
    torch.save(torch.arange(3), buffer)
    buffer.seek(0)
    with on_cpu():
        assert torch.load(buffer, map_location=location).tolist() == [0, 1, 2]


def test_a_default_device_on_a_cpu(on_cpu):
    with on_cpu():
        torch.set_default_device("cuda")
        try:
            assert torch.ones(2).sum().item() == 2
        finally:
            torch.set_default_device(None)


def test_compiled_modules_run_on_a_cpu(on_cpu):
    with on_cpu(2):
        layer = nn.Linear(4, 4).cuda()
        batch = torch.ones(2, 4, device="cuda")
        compiled = torch.compile(layer, backend="aot_eager")
        assert torch.equal(compiled(batch), layer(batch))


def test_graphs_of_real_tensors_are_refused(on_cpu):
    with (
        on_cpu(2),
        pytest.raises(UsageError, match="Use --fake, which records captures"),
    ):
        torch.cuda.CUDAGraph()


def test_several_gpus_of_one_process_are_refused(rehearse):
    with rehearse(8), pytest.raises(UsageError, match="use DistributedDataParallel"):
        nn.DataParallel(nn.Linear(4, 4).cuda())(torch.ones(2, 4))


def test_ranks_meet_at_a_store(rehearse):
    with rehearse(8, 3):
        mine = dist.TCPStore("elsewhere", 29500, 8, is_master=False)
        dist.init_process_group("nccl", store=mine, rank=3, world_size=8)
        for store in (mine, dist.PrefixStore("run", mine)):
            store.set("config", "a")
            store.wait(["of_rank_0"])
            assert store.get("config") == b"a"
            assert store.add("arrived", 1) == 8  # so are all others
            assert int(store.get("arrived")) == 8
            assert store.compare_set("config", "a", "b") == b"b"
            assert store.delete_key("config")
            with pytest.raises(
                UsageError, match="would set it, and only rank 3 is reh"
            ):
                store.get("config")
    assert isinstance(dist.TCPStore, type)


HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    ("words", "sent"),  # bytes of each parameter
    [
        ({}, {"all_gather": 4, "reduce_scatter": 4}),
        (
            {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},  # gathered twice
            {"all_gather": 8, "reduce_scatter": 4},
        ),
        (
            {"mixed_precision": HALF, "device_id": 0},
            {"all_gather": 2, "reduce_scatter": 4},
        ),
        ({"sharding_strategy": ShardingStrategy.NO_SHARD}, {"all_reduce": 4}),
    ],
)
def test_parameters_of_the_first_fsdp(rehearse, use_orig_params, words, sent):
    layers = [nn.Linear(64, 64, bias=False) for _ in range(2)]
    with rehearse(2) as recording:
        dist.init_process_group("nccl")
        model = FullyShardedDataParallel(
            nn.Sequential(*layers).cuda(), use_orig_params=use_orig_params, **words
        )
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(4, 64, device="cuda")).sum().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        whole = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        kind = StateDictType.FULL_STATE_DICT
        with FullyShardedDataParallel.state_dict_type(model, kind, whole):
            assert model.state_dict()["0.weight"].shape == (64, 64)
    messages = Counter()
    for event in recording.events:
        if isinstance(event, Comm) and event.site.step == 1 and event.inputs[0].shape:
            messages[event.kind] += event.payload_bytes  # and no norm
    count = 2 * 64 * 64
    assert messages == {kind: nbytes * count for kind, nbytes in sent.items()}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("offloads", [False, True])
def test_states_of_the_first_fsdp_on_every_rank(
    rehearse, rank, use_orig_params, offloads
):
    """Rank 0 knows which states there are, or each rank those that it has a part of."""
    with rehearse(2, rank):
        dist.init_process_group("nccl")
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64)),
            use_orig_params=use_orig_params,
            cpu_offload=CPUOffload(offload_params=offloads),
            device_id=0,
        )
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        whole = (
            FullStateDictConfig(offload_to_cpu=True),
            FullOptimStateDictConfig(offload_to_cpu=True),
        )
        kind = StateDictType.FULL_STATE_DICT
        with FullyShardedDataParallel.state_dict_type(model, kind, *whole):
            model.load_state_dict(model.state_dict())
            states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            shapes = {
                name: each["exp_avg"].shape for name, each in states["state"].items()
            }
            assert shapes == {
                "0.weight": (64, 64),
                "1.weight": (64, 64),
                "1.bias": (64,),
            }
            optimizer.load_state_dict(
                FullyShardedDataParallel.optim_state_dict_to_load(
                    model, optimizer, states
                )
            )
        model(torch.ones(4, 64, device="cuda")).sum().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("rank", [0, 1])
def test_states_that_rank_0_alone_reads(rehearse, rank):
    with rehearse(2, rank):
        dist.init_process_group("nccl")
        model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=0)
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"exp_avg": torch.zeros(8, 8), "step": torch.tensor(1.0)}
        bias = {**state, "exp_avg": torch.zeros(8)}
        states = {"state": {"weight": state, "bias": bias}}
        FullyShardedDataParallel.set_state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
            FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True),
        )
        load = FullyShardedDataParallel.optim_state_dict_to_load
        if rank == 0:
            (loaded,) = load(model, optimizer, states)["state"].values()
            assert loaded["exp_avg"].shape == (36,)
        else:
            with pytest.raises(UsageError, match="only rank 1 is rehearsed here"):
                load(model, optimizer, None)


def tied():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


def resume(path, location):
    model = tied().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    file = torch.load(path, location)
    model.load_state_dict(file["model"])
    optimizer.load_state_dict(file["optimizer"])
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    return file


@pytest.mark.parametrize("saved_on", ["cpu", "cuda:3"])
@pytest.mark.parametrize(
    ("location", "device"),
    [
        (None, None),
        ("cpu", "cpu"),
        ("cuda", "cuda:0"),
        (torch.device("cuda", 0), "cuda:0"),
        ({"cpu": "cuda:0", "cuda:3": "cuda:0"}, "cuda:0"),
        (lambda storage, place: storage, "cpu"),
    ],
)
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_script_resumes_from_a_file(
    rehearse, tmp_path, monkeypatch, saved_on, location, device, is_zip
):
    """torch would load on the meta device, as if the rehearsal were a trace."""
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path = tmp_path / "checkpoint.pt"
    with monkeypatch.context() as saving:
        saving.setattr(torch.serialization, "location_tag", lambda storage: saved_on)
        torch.save(
            {**states, "generator": torch.get_rng_state()},
            path,
            _use_new_zipfile_serialization=is_zip,
        )
    expected = device or saved_on
    expected = "cuda:0" if expected == "cuda:3" else expected
    with rehearse():
        file = resume(path, location)
        weight, step = file["model"]["0.weight"], file["optimizer"]["state"][0]["step"]
        assert str(weight.device) == str(file["model"]["1.weight"].device) == expected
        if expected == "cpu":
            assert step.item() == 2  # one more
            assert torch.equal(weight, model[0].weight)
            weight.zero_()
        if expected == "cpu" or is_zip:  # before, values are behind the tensors
            torch.set_rng_state(file["generator"].cpu())
    assert torch.load(path, "cpu")["model"]["0.weight"].any()  # the file stays


@pytest.mark.parametrize("words", [{}, {"device_id": 0}])
def test_the_first_fsdp_runs_on_a_cpu(on_cpu, words):
    with on_cpu(2):
        model = FullyShardedDataParallel(nn.Linear(4, 4), **words)
        with CommDebugMode() as mode:
            model(torch.ones(2, 4, device="cuda")).sum().backward()
    assert mode.ledger.total(kind="all_gather").payload_bytes == 4 * (4 * 4 + 4)
    assert mode.ledger.total(kind="reduce_scatter").payload_bytes == 4 * (4 * 4 + 4)


def test_what_the_first_fsdp_sends_when_it_is_made_is_noted_on_a_cpu(on_cpu):
    with on_cpu(2) as notes:
        dist.init_process_group("nccl")
        words = {"use_orig_params": True, "device_id": 0, "sync_module_states": True}
        FullyShardedDataParallel(nn.Linear(4, 4), **words)
    assert any("sync_module_states" in note for note in notes)


def test_objects_of_other_ranks_on_a_cpu(on_cpu):
    """What a group that answers at once gives has no meaning, and any size."""
    with on_cpu(4):
        dist.init_process_group("nccl")
        gathered = [None] * 4
        dist.all_gather_object(gathered, {"a": 1})
        assert gathered == [{"a": 1}] * 4
        with pytest.raises(UsageError, match="would come from rank 1"):
            dist.recv_object_list([None], src=1)


def test_sparse_gradients_are_not_sent(rehearse):
    with rehearse(2):
        dist.init_process_group("nccl")
        table = DistributedDataParallel(nn.Embedding(9, 4, sparse=True).cuda())
        with pytest.raises(UsageError, match="NCCL sends no sparse tensors"):
            table(torch.tensor([1], device="cuda")).sum().backward()


def test_a_profile_has_no_events(rehearse):
    with rehearse(), torch.profiler.profile() as profile:
        assert len(profile.key_averages()) == 0
        assert list(profile.key_averages()) == []


def test_streams_and_events_are_recorded(rehearse):
    with rehearse() as recording:
        on_a_stream()
    kinds = {type(event) for event in recording.events}
    assert {EventRecord, EventWait, StreamWait, RecordStream, Synchronize} <= kinds
    assert recording.streams[1] == "side stream"


def test_results_of_collectives_are_waited_for_when_they_are_used(rehearse):
    with rehearse(4) as recording:
        mesh = init_device_mesh("cuda", (4,))
        x = torch.ones(8, 8, device="cuda", requires_grad=True)
        part = DTensor.from_local(x, mesh, [Shard(0)])
        whole = part.redistribute(placements=[Replicate()], async_op=True).to_local()
        product = x @ x
        (whole.exp().sum() + product.sum()).backward()
        dist.destroy_process_group()
    order = [
        getattr(event, "kind", "wait") if isinstance(event, Comm | Wait) else event.name
        for event in recording.events
        if isinstance(event, Op | Comm | Wait)
    ]
    gathered, waited = order.index("all_gather"), order.index("wait")
    assert gathered < order.index("aten.mm.default") < waited
    assert order[waited + 1] == "aten.exp.default"
    assert x.grad.shape == x.shape


def test_item_gives_a_value_and_a_note(rehearse):
    with rehearse() as recording:
        assert torch.randn(2, device="cuda").sum().item() == 1.0
        assert torch.full((), 3.0, device="cuda").item() == 3.0
    assert len(recording.notes) == 1
    assert "test_presented_cuda.py" in recording.notes[0]
    assert "reads a value: 1.0 was given" in recording.notes[0]


def test_branch_on_a_value_is_refused(rehearse):
    with rehearse(), pytest.raises(NoValueError) as error:
        if torch.randn(2, device="cuda").sum() > 1:
            pass
    assert "test_presented_cuda.py" in str(error.value)
    assert "branches on a value that a rehearsal does not have" in str(error.value)
    assert "isnan, isinf and isfinite are answered" in str(error.value)


def test_arguments_of_distributions_are_valid(rehearse):
    with rehearse():
        policy = torch.distributions.Categorical(logits=torch.randn(8, 6).cuda())
        actions = torch.randint(6, (8,), device="cuda")
        assert policy.log_prob(actions).shape == (8,)


def test_unknown_numbers_differ(rehearse):
    """As of a norm that something is divided by."""
    with rehearse() as recording:
        norm = torch.randn(4, device="cuda").norm()
        assert not norm == 0
        assert norm != 0
        assert [float(1 / norm) if norm != 0.0 else 0.0] == [1.0]
    notes = [each for each in recording.notes if "unknown numbers" in each]
    assert all(each.endswith("were taken to differ.") for each in notes)
    assert len(notes) == 3


def test_an_optimizer_that_branches_on_values_is_noted(rehearse):
    with rehearse() as recording:
        layer = nn.Linear(4, 4).cuda()

        def loss():
            layer.zero_grad()
            total = layer(torch.randn(2, 4, device="cuda")).sum()
            total.backward()
            return total

        torch.optim.LBFGS(layer.parameters()).step(loss)
    assert any("optimizer branches on values" in note for note in recording.notes)


def test_host_tensors_keep_their_values(rehearse):
    with rehearse():
        assert torch.arange(4).sum().item() == 6
        assert sorted(torch.randperm(4).tolist()) == [0, 1, 2, 3]
        assert isinstance(torch.empty(1 << 24), FakeTensor)  # 64 MiB are not made


def test_what_compiled_code_would_do_at_the_same_time_is_noted(rehearse):
    from torch._inductor import config

    with config.patch(_micro_pipeline_tp=True), rehearse() as recording:
        torch.compile(nn.Linear(4, 4).cuda())
    assert any("would split products" in note for note in recording.notes)


def test_a_library_is_named_by_its_own_path(rehearse):
    source = "def read(x):\n    return x.item()\n"
    names = {}
    exec(compile(source, "/venv/lib/site-packages/library/loss.py", "exec"), names)
    with rehearse() as recording:
        names["read"](torch.rand(1, device="cuda"))
    assert recording.notes[0].startswith("library/loss.py:2 read reads a value")


def test_compiled_regions_are_numbered(rehearse):
    with rehearse() as recording:
        layer = torch.compile(nn.Linear(4, 4).cuda())
        for _ in range(2):
            layer(torch.ones(2, 4, device="cuda"))
    regions = {e.region for e in recording.events if isinstance(e, Op)}
    assert regions == {None, 0, 1}
    assert any("torch.compile" in note for note in recording.notes)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes_with_cuda_graphs_replay_their_regions(rehearse, mode):
    with rehearse() as recording:
        layer = torch.compile(nn.Linear(4, 4).cuda(), mode=mode)
        layer(torch.ones(2, 4, device="cuda")).sum().backward()
    ways = {
        (event.site.phase, event.through)
        for event in recording.events
        if isinstance(event, Op) and event.region is not None
    }
    way = "eager" if mode == "default" else "replay"
    assert ways == {(Phase.FORWARD, way), (Phase.BACKWARD, way)}
    noted = any("one replay of a CUDA graph" in note for note in recording.notes)
    assert noted is (mode != "default")


def test_checkpoints_are_skipped_and_noted(rehearse, tmp_path):
    plain = torch.save, dcp.save, dcp.state_dict_saver.save, dcp.async_save, dcp.load
    with rehearse(8) as recording:
        dist.init_process_group("nccl")
        state = nn.Linear(4, 4).cuda().state_dict()
        torch.save(state, tmp_path / "model.pt")
        dcp.save(state, checkpoint_id=tmp_path / "one")
        dcp.async_save(state, checkpoint_id=tmp_path / "two").result()
        dcp.load(state, checkpoint_id=tmp_path / "three")
        buffer = io.BytesIO()
        torch.save({"epoch": 3}, buffer)
        buffer.seek(0)
        assert torch.load(buffer) == {"epoch": 3}
    assert not list(tmp_path.iterdir())
    notes = "\n".join(recording.notes)
    assert notes.count("saves a checkpoint: skipped, its time too.") == 3
    assert "loads a checkpoint: skipped, the state stays as it was made." in notes
    assert plain == (
        torch.save,
        dcp.save,
        dcp.state_dict_saver.save,
        dcp.async_save,
        dcp.load,
    )


def test_a_checkpoint_that_is_not_written_can_be_renamed(rehearse, tmp_path):
    old, new, copied = tmp_path / "old.pt", tmp_path / "new.pt", tmp_path / "best.pt"
    real, moved = tmp_path / "real.txt", tmp_path / "moved.txt"
    new.write_text("the checkpoint of the last run")
    real.write_text("a file")
    with rehearse():
        torch.save({}, old)
        assert os.path.getsize(old) == 0  # noqa: PTH202
        old.rename(new)
        shutil.copy(new, copied)
        copied.unlink()
        real.rename(moved)
    assert new.read_text() == "the checkpoint of the last run"
    assert sorted(tmp_path.iterdir()) == [moved, new]


def test_offloaded_parameters_hold_no_memory_and_are_initialised(rehearse):
    with rehearse(8) as recording:
        dist.init_process_group("nccl")
        with torch.device("meta"):
            model = nn.Linear(512, 512)
        fully_shard(model, offload_policy=CPUOffloadPolicy())
        model.to_empty(device="cpu")
        weight = model.weight.to_local()
        assert weight.device.type == "cpu"
        assert isinstance(weight, FakeTensor)
        # Draws again, until nothing is out of bounds.
        nn.init.trunc_normal_(model.weight, std=0.02, a=-0.04, b=0.04)
        assert isinstance(torch.empty(4).new_empty(1 << 22), FakeTensor)
    assert recording.notes == []


def test_ranks_of_a_node(rehearse, monkeypatch):
    import os

    with rehearse(64, 13):
        assert os.environ["LOCAL_RANK"] == "5"
        dist.init_process_group("nccl", init_method="env://")
        assert (dist.get_rank(), dist.get_world_size()) == (13, 64)
        assert dist.get_backend() == "nccl"
        objects = [None] * 64
        dist.all_gather_object(object_list=objects, obj="a")
        assert objects == ["a"] * 64
        gathered = [None] * 64
        dist.gather_object(obj="b", object_gather_list=gathered, dst=13)
        assert gathered == ["b"] * 64
    assert not dist.is_initialized()
    assert "LOCAL_RANK" not in os.environ


def _patched_names():
    owners = (
        torch,
        torch.cuda,
        torch.cuda.memory,
        torch.cuda.random,
        torch.accelerator,
        torch.Tensor,
        torch.UntypedStorage,
        FakeTensor,
        nn.Module,
        F,
        dist,
        dist.distributed_c10d,
        dist.device_mesh,
        dist.ProcessGroup,
        dist.Work,
        torch.autograd,
        torch.optim.Optimizer,
        torch.profiler,
        torch.version,
        torch.serialization,
        DistributedDataParallel,
        FullyShardedDataParallel,
        nn.SyncBatchNorm,
        dist.device_mesh.DeviceMesh,
    )
    return {
        (str(owner), name): value
        for owner in owners
        for name, value in vars(owner).items()
        if not name.startswith("__") or name == "__init__"
    }


@pytest.mark.parametrize("where", ["rehearse", "on_cpu"])
def test_nothing_of_torch_stays_patched(request, where):
    for warm_up in (True, False):
        before = _patched_names()
        with request.getfixturevalue(where)(2), pytest.raises(ZeroDivisionError):
            dist.init_process_group("nccl")
            scaled()
            with torch.autocast("cuda", dtype=torch.float16):
                F.dropout(torch.ones(2, device="cuda")).sum()
            raise ZeroDivisionError
        after = _patched_names()
        if not warm_up:  # imports of the first time add names
            assert before.keys() == after.keys()
            changed = [key for key in before if before[key] is not after[key]]
            assert changed == []
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert not torch.__future__.get_swap_module_params_on_conversion()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.ones(2, 2) @ torch.ones(2, 2)
        assert F.softmax(y, -1).dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match="batch_norm_stats"):
        torch.batch_norm_stats(torch.ones(2, 2), 1e-5)


def test_a_number_is_formatted_as_on_a_gpu(rehearse):
    with rehearse():
        norm = torch.randn(3, device="cuda").norm()
        assert f"{norm:.2f}" == "1.00"
        assert f"{norm}" == "1.0"


# --- which way a model goes ---------------------------------------------------------


def test_small_integers_keep_their_values(rehearse):
    with rehearse() as recording:
        mask = torch.ones(2, 8, dtype=torch.int64).to("cuda")
        assert mask.all()
        positions = torch.arange(8, device="cuda").unsqueeze(0)
        restarts = (positions.diff(dim=-1) != 1).cumsum(-1)
        assert (restarts[:, -1] == 0).all()
        assert mask.sum().item() == 16
        assert positions[0, 3:5].tolist() == [3, 4]
    assert recording.notes == []


def test_of_unknown_values_all_are_chosen(rehearse):
    with rehearse() as recording:
        places = torch.randn(3, device="cuda").nonzero()
        assert places.shape == (3, 1)  # all are chosen
        assert len(places.tolist()) == 3
    assert any("chooses by values" in note for note in recording.notes)


def test_what_is_written_is_not_known_any_more(rehearse):
    with rehearse() as recording:
        mask = torch.ones(8, dtype=torch.bool, device="cuda")
        assert mask.all()
        assert recording.notes == []
        view = mask[2:]
        view.logical_and_(torch.randn(6, device="cuda") > 0.5)
        assert mask.all()
    assert "asks whether all of some values are true" in recording.notes[0]


def test_a_model_is_not_told_that_it_is_traced(rehearse):
    with rehearse():
        x = torch.empty(2, device="cuda")
        assert not isinstance(x, torch._subclasses.FakeTensor)
    with FakeTensorMode():
        assert isinstance(torch.empty(2), torch._subclasses.FakeTensor)


def operators_of(recording):
    return [event for event in recording.events if isinstance(event, Op)]


def test_products_say_whether_tf32_is_allowed(rehearse):
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        with rehearse() as recording:
            x = torch.empty(4, 4, device="cuda")
            for allowed in (False, True):
                torch.backends.cuda.matmul.allow_tf32 = allowed
                x @ x
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    products = [op for op in operators_of(recording) if op.name == "aten.mm.default"]
    assert [dict(op.scalars)["allow_tf32"] for op in products] == [False, True]


def test_a_mask_like_unknown_tokens_is_known(rehearse):
    """As Hugging Face's models ask, of a mask that the script makes on the device."""
    with rehearse() as recording:
        ids = torch.randint(0, 100, (4, 16), device="cuda")
        mask = torch.ones_like(ids)
        assert mask.bool().sum() == mask.numel()
        assert torch.all(mask == 1)
        mask = torch.full_like(ids, 0)
        assert not torch.any(mask)
    assert not [note for note in recording.notes if "asks whether" in note]


@pytest.mark.parametrize(
    ("make", "is_causal"),
    [
        (lambda: torch.full((8, 8), -torch.inf, device="cuda").triu(1), True),
        (lambda: torch.full((8, 8), -torch.inf).triu(1).cuda(), True),
        (
            lambda: torch.zeros(8, 8, device="cuda").masked_fill(
                torch.ones(8, 8, device="cuda", dtype=torch.bool).triu(1), -torch.inf
            ),
            True,
        ),
        (lambda: torch.full((8, 8), -torch.inf, device="cuda").triu(2), False),
        (lambda: torch.zeros(8, 8, device="cuda"), False),
    ],
)
def test_masks_by_infinity_are_known(rehearse, make, is_causal):
    """As torch.nn.Transformer asks whether a mask is the causal one."""
    with rehearse() as recording:
        causal = nn.Transformer.generate_square_subsequent_mask(8, device="cuda")
        assert bool((make() == causal).all()) == is_causal
    assert recording.notes == []


def test_a_truth_that_is_read_is_the_one_that_is_branched_on(rehearse):
    with rehearse() as recording:
        equal = (torch.rand(3, device="cuda") == torch.rand(3, device="cuda")).all()
        assert equal.item() is True
        assert equal
    assert ["reads a value: True" in note for note in recording.notes] == [True, False]


def test_whether_all_of_unknown_values_are_true_is_noted(rehearse):
    with rehearse() as recording:
        ids = torch.randint(0, 100, (4, 16), device="cuda")
        mask = ids != 1
        assert mask.all()
        assert mask.sum() == mask.numel()
        assert not (ids < 0).any()
        assert not mask.sum() == 3
    told = [note for note in recording.notes if "asks whether" in note]
    assert [note.split("asks whether ")[1] for note in told] == [
        "all of some values are true: True was given.",
        "any of some values are true: False was given.",
    ]
    told = [note.split("branches on ")[1] for note in recording.notes[1:4:2]]
    assert told[0] == (
        "a value: True was given, as all of a mask are taken to be true."
    )


def test_group_norm_gives_up_channels_last_as_on_cuda(rehearse):
    with rehearse():
        x = torch.empty(2, 8, 4, 4, device="cuda")
        x = x.to(memory_format=torch.channels_last)
        result = torch.nn.functional.group_norm(x, 2)
        assert result.is_contiguous()


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "batch_first": True}])
def test_recurrent_layers_are_one_operator_as_on_cuda(rehearse, layer, options):
    with rehearse() as recording:
        model = layer(8, 16, 2, dropout=0.1, **options).cuda()
        x = torch.empty(5, 3, 8, device="cuda", requires_grad=True)
        output, last = model(x)
        output.sum().backward()
        shapes = [tuple(p.grad.shape) for p in model.parameters()]
        assert x.grad.shape == x.shape
    assert shapes == [tuple(p.shape) for p in model.parameters()]
    with torch.device("cpu"):
        plain = layer(8, 16, 2, **options)
        expected, states = plain(torch.zeros(5, 3, 8))
    assert output.shape == expected.shape
    assert nn.LSTM is not layer or [s.shape for s in last] == [s.shape for s in states]
    names = [op.name for op in operators_of(recording)]
    assert names.count("aten._cudnn_rnn.default") == 1
    assert names.count("aten._cudnn_rnn_backward.default") == 1
    assert not [name for name in names if "mm" in name or "mkldnn" in name]


@pytest.mark.parametrize("shape", [(2, 8, 6, 4), (8, 6, 4), (2, 3, 8, 6, 4)])
def test_shuffled_pixels_are_a_copy_with_channels_first_as_on_cuda(rehearse, shape):
    with rehearse() as recording:
        x = torch.empty(shape, device="cuda")
        if len(shape) == 4:
            x = x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        up = torch.nn.functional.pixel_shuffle(x, 2)
        down = torch.nn.functional.pixel_unshuffle(up, 2)
        assert up.is_contiguous() and down.is_contiguous()
        down.sum().backward()
        assert x.grad.shape == down.shape == x.shape
    assert up.shape == (*shape[:-3], 2, 12, 8)
    names = [op.name for op in operators_of(recording)]
    assert names.count("aten.clone.default") == 4
    assert not [name for name in names if "pixel" in name]
    plain = torch.arange(32.0).reshape(1, 8, 2, 2).requires_grad_()
    expected = torch.nn.functional.pixel_shuffle(plain, 2)
    with rehearse():  # tensors of the host keep their values
        found = torch.nn.functional.pixel_shuffle(plain, 2)
        (back,) = torch.autograd.grad(found, plain, found.detach())
    assert torch.equal(found, expected) and torch.equal(back, plain)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_cells_have_one_kernel_for_their_gates_as_on_cuda(rehearse, name, autocast):
    cell = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}[name]
    with rehearse() as recording:
        model = cell(8, 16).cuda()
        x = torch.empty(3, 8, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            found = model(x)
        state = found if name == "gru" else found[0]
        assert state.shape == (3, 16)
        state.float().sum().backward()
        grads = [tuple(p.grad.shape) for p in model.parameters()]
        assert grads == [tuple(p.shape) for p in model.parameters()]
        assert x.grad.shape == x.shape
    assert cell(8, 16)(torch.zeros(3, 8))[0] is not None  # a CPU's own again
    operators = operators_of(recording)
    names = [op.name for op in operators]
    (fused,) = [
        op for op in operators if op.name == f"aten._thnn_fused_{name}_cell.default"
    ]
    assert {each.dtype for each in fused.inputs} == {
        "bfloat16" if autocast else "float32"
    }
    assert sum(f"_thnn_fused_{name}_cell_backward" in name_ for name_ in names) == 1
    assert (
        names.count("aten.mm.default") == 2 + 2 + 1
    )  # the first state has no gradient
    assert not [each for each in names if "sigmoid" in each or "tanh" in each]


def test_recurrent_layers_under_autocast_are_in_16_bits(rehearse):
    with rehearse() as recording, torch.autocast("cuda", dtype=torch.bfloat16):
        model = nn.LSTM(8, 16).cuda()
        output, _ = model(torch.empty(5, 3, 8, device="cuda"))
        output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    [op] = [
        op for op in operators_of(recording) if op.name == "aten._cudnn_rnn.default"
    ]
    assert {spec.dtype for spec in op.inputs} == {"bfloat16"}


def test_packed_sequences_are_as_long_as_they_are(rehearse):
    with rehearse() as recording:
        model = nn.LSTM(8, 16, batch_first=True).cuda()
        x = torch.empty(3, 9, 8, device="cuda")
        lengths = torch.tensor([9, 4, 2])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        assert packed.batch_sizes.tolist() == [3, 3, 2, 2, 1, 1, 1, 1, 1]
        output, _ = model(packed)
        assert output.data.shape == (15, 16)
        padded, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
        assert padded.shape == (3, 9, 16)
        padded.sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    [op] = [
        op for op in operators_of(recording) if op.name == "aten._cudnn_rnn.default"
    ]
    cells, (each, *_) = recurrent_products(op)
    assert (cells, each) == (9, (1, 2, 64, 16))  # two sequences in the mean


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_connectionist_temporal_classification(rehearse, reduction):
    with rehearse():
        scores = torch.empty(40, 4, 16, device="cuda", requires_grad=True)
        targets = torch.ones(4, 10, device="cuda", dtype=torch.int64)
        lengths = torch.full((4,), 40), torch.full((4,), 10)
        loss = F.ctc_loss(
            scores.log_softmax(-1), targets, *lengths, reduction=reduction
        )
        assert loss.shape == ((4,) if reduction == "none" else ())
        loss.sum().backward()
        assert scores.grad.shape == scores.shape


DOCUMENTS: list[torch.Tensor] = []


def _same_document(
    b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    return DOCUMENTS[0][q] == DOCUMENTS[0][k]


def _window(
    b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    return (q >= k) & (q - k < 128)


# A window of 128 is in 2 blocks of a row. Causal attention counts half, as its price does;
# a block of the diagonal more, 1 in 8 for 1024 rows, is in the price of every part.
@pytest.mark.parametrize(
    ("mask", "length", "part", "is_causal", "seen"),
    [
        (lambda b, h, q, k: q >= k, 1024, 0.5, True, "those of the blocks"),
        (lambda b, h, q, k: q >= 0, 1024, 1.0, False, "those of the blocks"),
        (_window, 1024, 15 / 64 * 8 / 9, True, "those of the blocks"),
        (_window, 8192, 127 / 4096 * 64 / 65, True, "those of the blocks"),
        (_same_document, 1024, 0.5, True, "its mask could not be looked at"),
    ],
)
def test_flex_attention_computes_the_blocks_of_its_mask(
    rehearse, mask, length, part, is_causal, seen
):
    with rehearse() as recording:
        q = torch.empty(2, 4, length, 64, device="cuda", dtype=torch.bfloat16)
        q.requires_grad_()
        DOCUMENTS[:] = [torch.randint(4, (length,), device="cuda")]
        blocks = create_block_mask(mask, None, None, length, length, device="cuda")
        count = len(operators_of(recording))
        result = torch.compile(flex_attention)(q, q, q, block_mask=blocks)
        assert len(operators_of(recording)) - count < 10  # the mask is looked at unseen
        result.sum().backward()
        assert q.grad.shape == q.shape
    text = (
        f"flex_attention is priced as a compiled FlashAttention 2, with {part:.1%} of"
    )
    assert any(x.startswith(f"{text} its scores: {seen}") for x in recording.notes)
    name = "aten._scaled_dot_product_flash_attention"
    for op in operators_of(recording):
        if op.name.startswith(name):
            facts = dict(op.scalars)
            assert facts["part_of_scores"] == pytest.approx(part, rel=0.02)
            assert (facts.get("is_causal", False), facts["cudnn"]) == (is_causal, False)
            times = 2.5 if "backward" in op.name else 1
            flops = times * 4 * 8 * length**2 * 64 * part
            assert op_flops(op) == pytest.approx(flops, rel=0.02)


def test_recurrent_layers_on_the_cpu_stay_as_they_are(rehearse):
    with rehearse() as recording:
        nn.GRU(8, 16)(torch.zeros(5, 3, 8))
    assert "aten._cudnn_rnn.default" not in {o.name for o in operators_of(recording)}


def test_attention_with_a_mask_takes_cudnns_kernel_on_hopper(rehearse):
    with rehearse() as recording:
        q = torch.empty(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
        q.requires_grad_()
        mask = torch.ones(16, 16, device="cuda", dtype=torch.bool).tril()
        attend = torch.nn.functional.scaled_dot_product_attention
        attend(q, q, q, attn_mask=mask).sum().backward()
        with torch.no_grad():
            short = torch.empty(2, 4, 16, 64, device="cuda")
            attend(short, short, short, attn_mask=mask)
    names = [op.name for op in operators_of(recording)]
    name = "aten._scaled_dot_product_cudnn_attention"
    assert f"{name}.default" in names
    assert f"{name}_backward.default" in names
    assert "aten._scaled_dot_product_efficient_attention.default" in names


def test_attention_with_a_learned_bias_does_not_take_cudnns_kernel(rehearse):
    with rehearse() as recording:
        q = torch.empty(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
        bias = torch.empty(4, 16, 16, device="cuda", dtype=torch.bfloat16)
        bias.requires_grad_()
        attend = torch.nn.functional.scaled_dot_product_attention
        attend(q, q, q, attn_mask=bias).sum().backward()
    assert bias.grad is not None
    names = {op.name for op in operators_of(recording)}
    assert "aten._scaled_dot_product_efficient_attention_backward.default" in names


def test_gradients_that_are_cleared_first_stay_between_steps(rehearse):
    held = {}
    for first in (True, False):
        with rehearse() as recording:
            model = nn.Linear(64, 64).cuda()
            optimizer = torch.optim.SGD(model.parameters())
            for _ in range(3):
                if first:
                    optimizer.zero_grad()
                model(torch.empty(2, 64, device="cuda")).sum().backward()
                optimizer.step()
                if not first:
                    optimizer.zero_grad()
        assert recording.clears_first == first
        held[first] = count_memory(recording, load_gpu("h100")).steady
    assert held[True] - held[False] == 64 * 64 * 4 + 512


def test_waits_of_the_script_and_of_torch(rehearse):
    with rehearse() as recording:
        weight = torch.rand(3, device="cuda", requires_grad=True)
        optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler()
        loss = weight.sum()
        loss.item()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        float(loss.detach())
    waits = [each for each in recording.events if isinstance(each, Synchronize)]
    assert [each.reads_value for each in waits] == [True, False, True]


@pytest.mark.parametrize("critic_steps", [1, 3])
def test_a_step_is_a_round_of_all_optimizers(rehearse, critic_steps):
    """As of a GAN: what is told is not a part of an iteration."""
    with rehearse() as recording:
        critic, actor = nn.Linear(4, 4).cuda(), nn.Linear(4, 4).cuda()
        first = torch.optim.SGD(critic.parameters(), lr=0.1)
        second = torch.optim.AdamW(actor.parameters())
        x = torch.ones(2, 4, device="cuda")
        for _ in range(3):
            for _ in range(critic_steps):
                critic(x).sum().backward()
                first.step()
            actor(x).sum().backward()
            second.step()
    parts = critic_steps + 1  # of the first round
    assert recording.steps == parts + 2
    for step in (parts, parts + 1):
        products = [
            event
            for event in recording.events
            if isinstance(event, Op)
            and event.site.step == step
            and event.site.phase is Phase.FORWARD
            and event.name == "aten.addmm.default"
        ]
        assert len(products) == critic_steps + 1
    assert recording.notes == []


def test_optimizers_that_made_no_step_are_named(rehearse):
    with rehearse() as recording:
        model = nn.Linear(4, 4).cuda()
        used = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.optim.AdamW(model.parameters())
        other = torch.optim.RMSprop(model.parameters())
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        used.step()
    assert other.param_groups
    assert recording.notes == [
        "1 of 2 optimizers (RMSprop) made no step in those that were run. If the script "
        "steps them in turn, run more (--skip, --steps)."
    ]


# --- what a GPU would refuse ----------------------------------------------------------


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, device="cuda", dtype=dtype)


MIXED = {
    "mm": lambda half: ones(2, 3) @ ones(3, 2, dtype=half),
    "linear": lambda half: F.linear(ones(2, 3, dtype=half), ones(2, 3)),
    "bias": lambda half: F.linear(ones(2, 3), ones(2, 3), ones(2, dtype=half)),
    "convolution": lambda half: F.conv1d(ones(1, 3, 8), ones(2, 3, 3, dtype=half)),
    "attention": lambda half: F.scaled_dot_product_attention(
        ones(1, 2, 8, 16, dtype=half), ones(1, 2, 8, 16), ones(1, 2, 8, 16)
    ),
    "index_add": lambda half: ones(3).index_add_(
        0, torch.tensor([0], device="cuda"), ones(1, dtype=half)
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_kernels_refuse_several_dtypes(rehearse, name):
    """Shape functions do not: such a script failed first on the GPU."""
    with rehearse():
        MIXED[name](torch.float32)
        with pytest.raises(
            RuntimeError, match=r"same dtype, but got .*torch\.autocast"
        ):
            MIXED[name](torch.bfloat16)


def test_kernels_refuse_classes_of_32_bits(rehearse):
    with rehearse():
        classes = torch.zeros(4, dtype=torch.int32, device="cuda")
        F.cross_entropy(ones(4, 5), classes.long())
        with pytest.raises(RuntimeError, match=r"but got int32.*target.long\(\)"):
            F.cross_entropy(ones(4, 5), classes)


# --- operators without a shape function -----------------------------------------------


def test_a_kernel_of_the_host_is_a_model(rehearse):
    with rehearse() as recording:
        drawn = torch.distributions.Beta(ones(3), ones(3)).rsample()
        solved = torch.linalg.lstsq(ones(4, 3), ones(4, 2)).solution
        assert (drawn.shape, solved.shape) == ((3,), (3, 2))
        assert drawn.is_cuda
        large = torch.ones(3 << 20)  # of the host, without memory too
        assert not torch._sample_dirichlet(large).is_cuda
        assert torch.allclose(ones(2), ones(2))
    names = [event.name for event in recording.events if isinstance(event, Op)]
    assert "aten._sample_dirichlet.default" in names


def test_an_operator_that_has_no_model_is_refused(rehearse):
    with rehearse(), pytest.raises(UsageError, match="on dense tensors"):
        ones(3, 3).to_sparse()


# --- second derivatives ---------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.rms_norm(x, (8,), torch.ones(8, device="cuda")),
        lambda x: F.pixel_shuffle(x, 2).square(),
    ],
)
def test_penalties_on_gradients(rehearse, function):
    with rehearse():
        x = ones(2, 4, 8, 8).requires_grad_()
        (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


# --- sparse and nested tensors --------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # Adagrad's own
@pytest.mark.parametrize("optimizer", ["SparseAdam", "SGD", "Adagrad"])
def test_sparse_gradients_have_the_rows_that_were_looked_up(rehearse, optimizer):
    with rehearse():
        table = nn.Embedding(100, 8, sparse=True).cuda()
        steps = getattr(torch.optim, optimizer)(table.parameters(), lr=0.1)
        for _ in range(2):
            table(torch.tensor([1, 2, 3, 3], device="cuda")).sum().backward()
            assert table.weight.grad._values().shape == (4, 8)
            steps.step()
            steps.zero_grad()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # once in a process
def test_sparse_tensors_are_moved_and_multiplied(rehearse):
    with rehearse() as recording:
        places = torch.tensor([[0, 1, 1], [1, 0, 1]])
        graph = torch.sparse_coo_tensor(places, torch.ones(3), (2, 2)).coalesce().cuda()
        features = ones(2, 4).requires_grad_()
        result = torch.sparse.mm(graph, features)
        result.sum().backward()
        assert graph.is_cuda
        assert (result.shape, features.grad.shape) == ((2, 4), (2, 4))
    names = {event.name for event in recording.events if isinstance(event, Op)}
    assert any(name.startswith("sparse.") for name in names)
    assert not any(".mm." in name and name.startswith("aten") for name in names)


def test_attention_of_rows_of_different_lengths_is_refused(rehearse):
    with rehearse():
        layer = nn.Linear(64, 192, dtype=torch.bfloat16, device="cuda")
        rows = [torch.ones(n, 64, dtype=torch.bfloat16) for n in (2, 5)]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda")
        heads = [
            part.unflatten(-1, [2, 32]).transpose(1, 2)
            for part in layer(nested).chunk(3, -1)
        ]
        with pytest.raises(
            UsageError, match="Use flex_attention with a mask of the row"
        ):
            F.scaled_dot_product_attention(*heads)


@pytest.mark.parametrize("has_out", [False, True])
def test_products_that_are_added_in_another_type(rehearse, has_out):
    with rehearse() as recording:
        rows = torch.ones(3, 4, 8, dtype=torch.bfloat16, device="cuda")
        sums = torch.ones(3, 4, 4, device="cuda")
        for add, each in ((torch.addmm, lambda x: x[0]), (torch.baddbmm, lambda x: x)):
            left, right, before = each(rows), each(rows.mT), each(sums)
            more = {"out": before} if has_out else {}
            result = add(before, left, right, out_dtype=torch.float32, **more)
            assert (result.shape, result.dtype) == (before.shape, torch.float32)
            assert (result is before) == has_out
    names = [event.name for event in recording.events if isinstance(event, Op)]
    assert sum("addmm" in name or "baddbmm" in name for name in names) == 2


def test_nested_tensors_are_as_long_as_their_rows(rehearse):
    with rehearse() as recording:
        rows = [torch.ones(length, 4) for length in (3, 5)]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda")
        layer = nn.Linear(4, 2).cuda()
        layer(nested).values().sum().backward()
        assert layer.weight.grad is not None
    products = [
        event.inputs[0].shape
        for event in recording.events
        if isinstance(event, Op) and event.name == "aten.linear.default"
    ]
    assert products == [(8, 4)]


def copies(recording):
    return [e for e in recording.events if isinstance(e, Op) and "copy" in e.name]


def test_tensors_come_back_from_a_buffer_without_values(rehearse, tmp_path):
    with rehearse():
        model = nn.Linear(4, 3).cuda().bfloat16()
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "whole": model, "epoch": 3}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert loaded["epoch"] == 3
        weight, parameter = loaded["model"]["weight"], loaded["whole"].weight
        assert (weight.shape, weight.dtype, weight.is_cuda) == (
            (3, 4),
            torch.bfloat16,
            True,
        )
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad
        assert not weight.requires_grad
        again = io.BytesIO()
        torch.save(model.state_dict(), again)
        again.seek(0)
        model.load_state_dict(torch.load(again))  # weights_only
        with (tmp_path / "model.pt").open("wb") as file:
            torch.save(model.state_dict(), file)
    assert (tmp_path / "model.pt").read_bytes() == b""
    buffer.seek(0)
    with pytest.raises(
        UsageError, match="written while a script was rehearsed: its ten"
    ):
        torch.load(buffer, weights_only=False)


def test_a_parameter_whose_data_is_moved_stays_one(rehearse):
    """As the first FSDP moves a module to its ``device_id``."""
    with rehearse():
        parameter = nn.Parameter(torch.ones(4))
        with torch.no_grad():
            moved = parameter.to("cuda")
            parameter.data = moved
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad
        assert parameter.is_cuda
        assert moved.is_cuda
        (parameter * moved).sum().backward()
        assert parameter.grad.is_cuda
        frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        frozen.data = frozen.data.cuda()
        assert not frozen.requires_grad


def test_a_shallow_copy_has_the_same_memory(rehearse):
    with rehearse() as recording:
        tensor = torch.ones(1024, device="cuda")
        copied = copy.copy(tensor)
        assert copied.shape == tensor.shape
    assert len(recording.storages) == 1


def test_a_trainer_that_saves_by_way_of_a_buffer_writes_no_file(
    rehearse, tmp_path, monkeypatch
):
    saver = types.ModuleType("lightning.saver")

    def _atomic_save(checkpoint, filepath):
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        filepath.write_bytes(buffer.getvalue())

    saver._atomic_save = _atomic_save
    monkeypatch.setitem(sys.modules, "lightning.saver", saver)
    with rehearse() as recording:
        weight = torch.ones(2, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        weight.sum().backward()
        optimizer.step()
        saver._atomic_save({"weight": weight}, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())
    assert any("saves a checkpoint: skipped" in note for note in recording.notes)
    assert saver._atomic_save is _atomic_save


def test_a_thread_that_loads_batches_works_beside_the_one_that_trains(rehearse):
    side = []

    def load():
        with torch.cuda.stream(torch.cuda.Stream()):
            side.append(torch.cuda.current_stream().stream_id)
            return torch.ones(1024).pin_memory().cuda() + 1

    with rehearse() as recording, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        batch = loading.result()
        assert batch.is_cuda
        assert torch.cuda.current_stream().stream_id == 0
        batch * 2
    ops = [e for e in recording.events if isinstance(e, Op)]
    assert [(op.stream, op.through) for op in ops] == [
        (side[0], "thread"),
        (side[0], "thread"),
        (0, "eager"),
    ]
    # The host that trains does not wait for what another thread copies.
    assert not any(isinstance(e, Synchronize) for e in recording.events)
    assert [note[:21] for note in recording.notes] == ["Threads of the script"]
    figures = Figures(load_gpu("h100"))
    program = price_events(recording, Pricer(figures), range(len(recording.events)))
    hosts = {i.event.through: i.host for i in program.items if isinstance(i.event, Op)}
    assert hosts["thread"] == 0 < hosts["eager"]


def test_threads_that_are_left_end_behind_the_rehearsal(rehearse):
    went_on = threading.Event()

    def load():
        while True:
            torch.ones(2).cuda()
            went_on.set()

    with rehearse():
        thread = threading.Thread(target=load)
        thread.start()
        assert went_on.wait(10)
    thread.join(10)
    assert not thread.is_alive()


def test_errors_of_threads_are_the_scripts_own(rehearse):
    with rehearse(), ThreadPoolExecutor(1) as pool:
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 / 0).result()


@pytest.mark.parametrize(("is_static", "steps"), [(True, 3), (False, 2)])
def test_a_static_graph_is_steady_with_its_buckets(rehearse, is_static, steps):
    with rehearse(2) as recording, pytest.raises(EndOfWindow):
        dist.init_process_group("nccl")
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).cuda()
        model = DistributedDataParallel(
            model, static_graph=is_static, bucket_cap_mb=0.5
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ledger = CommDebugMode()
        with StepWindow(ledger, skip=1, steps=1, rehearsed=recording):
            for _ in range(5):
                model(torch.ones(2, 256, device="cuda")).sum().backward()
                optimizer.step()
    assert recording.steps == steps
    [*_, end, last] = [
        place
        for place, event in enumerate(recording.events)
        if getattr(event, "kind", None) is MarkKind.STEP_END
    ]
    sent = [e for e in recording.events[end:last] if isinstance(e, Comm)]
    assert len(sent) > 3
    assert not recording.warms_up
