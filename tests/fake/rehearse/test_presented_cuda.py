"""Common lines of scripts for GPUs, in a rehearsal; and torch as it was afterwards."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader

from torchspmd.rehearse.recording import (
    EventRecord,
    EventWait,
    Op,
    RecordStream,
    StreamWait,
    Synchronize,
)
from torchspmd.rehearse.values import NoValueError


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


IDIOMS = {
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


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom(rehearse, name):
    # Looked up by name inside: functions of torch.cuda are others there.
    with rehearse(2):
        function = IDIOMS[name]
        if name in ("is_available", "bf16"):
            function = {
                "is_available": torch.cuda.is_available,
                "bf16": torch.cuda.is_bf16_supported,
            }[name]
        assert function()


def test_streams_and_events_are_recorded(rehearse):
    with rehearse() as recording:
        on_a_stream()
    kinds = {type(event) for event in recording.events}
    assert {EventRecord, EventWait, StreamWait, RecordStream, Synchronize} <= kinds
    assert recording.streams[1] == "side stream"


def test_item_gives_a_value_and_a_note(rehearse):
    with rehearse() as recording:
        assert torch.ones(2, device="cuda").sum().item() == 1.0
        assert torch.full((), 3.0, device="cuda").item() == 3.0
    assert len(recording.notes) == 1
    assert "test_presented_cuda.py" in recording.notes[0]
    assert "reads a value: 1.0 was given" in recording.notes[0]


def test_branch_on_a_value_is_refused(rehearse):
    with rehearse(), pytest.raises(NoValueError) as error:
        if torch.ones(2, device="cuda").sum() > 1:
            pass
    assert "test_presented_cuda.py" in str(error.value)
    assert "branches on a value that a rehearsal does not have" in str(error.value)
    assert "isnan, isinf and isfinite are answered" in str(error.value)


def test_host_tensors_keep_their_values(rehearse):
    with rehearse():
        assert torch.arange(4).sum().item() == 6
        assert sorted(torch.randperm(4).tolist()) == [0, 1, 2, 3]
        assert isinstance(torch.empty(1 << 24), FakeTensor)  # 64 MiB are not made


def test_compiled_regions_are_numbered(rehearse):
    with rehearse() as recording:
        layer = torch.compile(nn.Linear(4, 4).cuda())
        for _ in range(2):
            layer(torch.ones(2, 4, device="cuda"))
    regions = {e.region for e in recording.events if isinstance(e, Op)}
    assert regions == {None, 0, 1}
    assert any("torch.compile" in note for note in recording.notes)


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
    )
    return {
        (str(owner), name): value
        for owner in owners
        for name, value in vars(owner).items()
        if not name.startswith("__")
    }


def test_nothing_of_torch_stays_patched(rehearse):
    for warm_up in (True, False):
        before = _patched_names()
        with rehearse(2), pytest.raises(ZeroDivisionError):
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


def test_a_number_is_formatted_as_on_a_gpu(rehearse):
    with rehearse():
        norm = torch.ones(3, device="cuda").norm()
        assert f"{norm:.2f}" == "1.00"
        assert f"{norm}" == "1.0"
