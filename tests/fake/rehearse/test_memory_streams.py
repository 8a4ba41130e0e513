"""Allocations and orders of small models, computed by hand."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from torchspmd.rehearse.recording import (
    Alloc,
    Category,
    Comm,
    EventWait,
    Free,
    Mark,
    MarkKind,
    Op,
    Phase,
    Wait,
)

WEIGHT = 4 * 64 * 32  # float32
BIAS = 4 * 64


def train(model, steps=2, **options):
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(steps):
        model(torch.randn(16, 32, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def place_of(recording, kind, step=0):
    return next(
        place
        for place, event in enumerate(recording.events)
        if isinstance(event, Mark) and event.kind is kind and event.value == step
    )


def operators(recording, phase):
    return [
        e.name for e in recording.events if isinstance(e, Op) and e.site.phase is phase
    ]


def test_linear_and_fused_adamw(rehearse, live_bytes):
    with rehearse() as recording:
        held = train(nn.Linear(32, 64).cuda(), fused=True)
    begin = place_of(recording, MarkKind.STEP_BEGIN, 0)
    assert live_bytes(recording, begin)["parameter"] == WEIGHT + BIAS
    end = place_of(recording, MarkKind.STEP_END, 1)
    # Two moments, and a float for the step of each parameter.
    assert live_bytes(recording, end) == {
        "parameter": WEIGHT + BIAS,
        "optimizer state": 2 * (WEIGHT + BIAS) + 2 * 4,
        "gradient": WEIGHT + BIAS,
    }
    assert recording.steps == 2
    assert held


def test_forward_backward_and_optimizer_are_told_apart(rehearse):
    with rehearse() as recording:
        train(nn.Linear(32, 64).cuda(), fused=True)
    assert "aten.addmm.default" in operators(recording, Phase.FORWARD)
    assert operators(recording, Phase.BACKWARD).count("aten.mm.default") == 2
    assert (
        operators(recording, Phase.OPTIMIZER).count("aten._fused_adamw_.default") == 2
    )


def test_what_autograd_keeps_is_saved(rehearse):
    with rehearse() as recording:
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU()).cuda()
        train(model, steps=1, fused=True)
    saved = {
        info.nbytes: info.module
        for info in recording.storages.values()
        if info.saved and info.site.phase is Phase.FORWARD
    }
    assert saved[4 * 16 * 64] in ("Sequential.0", "Sequential.1")


def test_recomputation(rehearse):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    with rehearse() as recording:
        train(Model().cuda(), steps=1, fused=True)
    assert "aten.gelu.default" in operators(recording, Phase.RECOMPUTE)


def test_every_storage_is_freed_once(rehearse):
    with rehearse() as recording:
        train(nn.Linear(32, 64).cuda(), fused=True)
    live = set()
    for event in recording.events:
        if isinstance(event, Alloc):
            assert event.storage not in live
            live.add(event.storage)
        elif isinstance(event, Free) and recording.storages[event.storage].nbytes:
            live.discard(event.storage)
    assert not live


def test_attention_is_cudas(rehearse):
    with rehearse() as recording:
        query = torch.randn(
            1, 2, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    names = [event.name for event in recording.events if isinstance(event, Op)]
    assert "aten._scaled_dot_product_flash_attention.default" in names
    # cuDNN's: the gradient of queries in float32, a float for each row, and 256 bytes.
    assert workspaces(recording) == [256, 4 * 2 * 8 * 64 + 4 * 2 * 8 + 256]


def workspaces(recording):
    return [e.nbytes for e in recording.events if isinstance(e, Alloc) and e.workspace]


def test_recurrent_layers_keep_what_cudnn_keeps(rehearse):
    """Peaks of jobs on an H200: an LSTM of two layers, and of three with dropout."""
    unit = 128 * 64 * 1024 * 4
    for layers, dropout, kept in ((2, 0.0, 11), (3, 0.2, 19)):
        with rehearse() as recording:
            lstm = torch.nn.LSTM(16, 1024, layers, dropout=dropout).cuda()
            lstm(torch.empty(128, 64, 16, device="cuda"))[0].sum().backward()
        sizes = [e.nbytes for e in recording.events if isinstance(e, Alloc)]
        assert sizes.count(kept * unit) == 1
        assert workspaces(recording).count(4 * unit) == 2


def test_flash_attention_rounds_rows_up(rehearse):
    with rehearse() as recording, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        query = torch.randn(
            1, 2, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    assert workspaces(recording) == [4 * 2 * 128 * 64 + 4 * 2 * 128]


@pytest.mark.parametrize(
    ("shape", "dims", "buffers"),
    [
        ((8192, 768), (0,), [50331648, 24]),
        ((8192, 2304), (0,), [139198464, 72]),
        ((8192, 3072), (0,), [138412032, 96]),
        ((64, 197, 768), (0, 1), [77463552, 24]),
        ((16, 768), (0,), []),
    ],
)
def test_a_sum_over_many_rows_takes_a_buffer(rehearse, shape, dims, buffers):
    """As an H200's allocator recorded it, which has 132 multiprocessors."""
    with rehearse() as recording:
        torch.randn(shape, device="cuda").sum(dims)
    assert workspaces(recording) == buffers


def gradient_bytes(recording):
    return sum(
        event.nbytes
        for event in recording.events
        if isinstance(event, Alloc)
        and event.site.phase is Phase.BACKWARD
        and not event.workspace
    )


def test_autograd_adds_gradients_in_place(rehearse):
    """As on CUDA: the second gradient of x goes into the first one."""
    nbytes = 4 * 64 * 64
    for function, count in (
        (lambda x: (x.sin() * x.cos()).sum(), 7),
        (lambda x: (x + x.sin()).sum(), 3),  # the first is one number, expanded
    ):
        with rehearse() as recording:
            model = Function(function)
            model(torch.ones(64, 64, device="cuda", requires_grad=True)).backward()
        assert gradient_bytes(recording) // nbytes == count


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def test_dropout_of_nothing_copies_nothing(rehearse):
    with rehearse() as recording:
        x = torch.ones(8, device="cuda")
        assert F.dropout(x, 0.0) is not None
        assert F.dropout(x, 0.5, training=False) is not None
    assert [e.nbytes for e in recording.events if isinstance(e, Alloc)] == [32]


def test_the_mask_of_dropout_comes_first(rehearse):
    with rehearse() as recording:
        y = F.dropout(torch.ones(64, device="cuda"), 0.5)
    assert [e.nbytes for e in recording.events if isinstance(e, Alloc)] == [
        256,
        64,
        256,
    ]
    assert y.shape == (64,)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: F.dropout(x, 0.1), "aten.native_dropout.default"),
        (lambda x: F.rms_norm(x, (8,)), "aten._fused_rms_norm.default"),
    ],
)
def test_fused_kernels_are_cudas(rehearse, function, name):
    with rehearse() as recording:
        function(torch.randn(4, 8, device="cuda", requires_grad=True)).sum().backward()
    assert name in [event.name for event in recording.events if isinstance(event, Op)]


def test_autocast_has_cudas_lists(rehearse):
    with rehearse(), torch.autocast("cuda", dtype=torch.bfloat16):
        x = torch.randn(8, 8, device="cuda")
        y = x @ x
        assert y.dtype == torch.bfloat16
        assert F.softmax(y, -1).dtype == torch.float32
        assert F.layer_norm(y, (8,)).dtype == torch.float32
        assert y.sum().dtype == torch.float32
        assert F.gelu(y).dtype == torch.bfloat16


def test_ddp_bucket(rehearse):
    with rehearse(2) as recording:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(nn.Linear(32, 64).cuda(), device_ids=[0])
        train(model, steps=3, fused=True)
    # Not the second step, in which ranks agree on other buckets.
    comms = [e for e in recording.events if isinstance(e, Comm) and e.site.step == 2]
    assert [comm.kind for comm in comms] == ["all_reduce"]
    assert comms[0].payload_bytes == WEIGHT + BIAS
    assert comms[0].ranks == (0, 1)
    waits = [e.comm for e in recording.events if isinstance(e, Wait)]
    assert comms[0].number in waits
    bucket = recording.storages[comms[0].inputs[0].storage]
    assert (bucket.nbytes, bucket.category) == (WEIGHT + BIAS, Category.COMMUNICATION)


def test_fsdp2_group(rehearse):
    with rehearse(4) as recording:
        mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("dp",))
        model = nn.Linear(32, 64).cuda()
        fully_shard(model, mesh=mesh)
        train(model, fused=True)
    step = [e for e in recording.events if isinstance(e, Comm) and e.site.step == 1]
    whole = WEIGHT + BIAS
    assert [(comm.kind, comm.payload_bytes, comm.axis) for comm in step] == [
        ("all_gather", whole, "dp"),
        ("reduce_scatter", whole, "dp"),
    ]
    # FSDP2 gathers on a stream of its own, and computes when its event has passed.
    assert step[0].stream != 0
    assert any(isinstance(event, EventWait) for event in recording.events)
    parameters = sum(
        info.nbytes
        for info in recording.storages.values()
        if info.category is Category.PARAMETER
    )
    assert parameters == whole // 4
    gathered = {
        info.nbytes
        for info in recording.storages.values()
        if info.category is Category.GATHERED_PARAMETER
    }
    assert {WEIGHT, BIAS} <= gathered


def test_two_optimizers_make_one_step(rehearse):
    with rehearse() as recording:
        model = nn.Linear(32, 64).cuda()
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        for _ in range(2):
            model(torch.randn(16, 32, device="cuda")).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert recording.steps == 2
    ends = [
        event.value
        for event in recording.events
        if isinstance(event, Mark) and event.kind is MarkKind.STEP_END
    ]
    assert ends == [0, 1]


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_collective_that_is_not_async_is_waited_for(rehearse, call):
    with rehearse(4) as recording:
        dist.init_process_group("nccl")
        whole, part = torch.ones(16, device="cuda"), torch.ones(4, device="cuda")
        # torch 2.13 has other names for two of them
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        if call == "all_reduce":
            dist.all_reduce(whole)
        elif call == "all_gather":
            gather(whole, part)
        else:
            scatter(part, whole)
        whole.add_(1)
    kinds = (Comm, Wait, Op)
    last = [event for event in recording.events if isinstance(event, kinds)][-3:]
    assert [type(event) for event in last] == [Comm, Wait, Op]
    assert last[1].comm == last[0].number


def test_a_work_is_waited_for_where_the_script_does(rehearse):
    with rehearse(4) as recording:
        dist.init_process_group("nccl")
        whole = torch.ones(16, device="cuda")
        work = dist.all_reduce(whole, async_op=True)
        other = torch.ones(4, device="cuda") + 1
        work.wait()
        del other
    kinds = [type(e) for e in recording.events if isinstance(e, Comm | Wait | Op)]
    assert kinds[-4:] == [Comm, Op, Op, Wait]


def test_attention_without_cudnn_is_told_apart(rehearse):
    def attend(kernel):
        x = torch.ones(1, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
        x.requires_grad_()
        with kernel:
            y = F.scaled_dot_product_attention(x, x, x)
        y.sum().backward()

    with rehearse() as recording:
        attend(contextlib.nullcontext())
        attend(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
    told = [
        dict(event.scalars).get("cudnn", True)
        for event in recording.events
        if isinstance(event, Op) and "attention" in event.name
    ]
    assert told == [True, True, False, False]


def test_the_peer_of_a_subgroup_is_told_by_its_global_rank(rehearse):
    with rehearse(4) as recording:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
        dist.send(torch.ones(4, device="cuda"), dst=2, group=mesh["pp"].get_group())
    sent = [event for event in recording.events if isinstance(event, Comm)]
    assert [(event.kind, event.peer) for event in sent] == [("send", 2)]


def by_category(recording):
    return {info.category for info in recording.storages.values()}


def test_what_a_wrapped_model_computes_is_not_communication(rehearse):
    """Even where no code of the user's is between DDP and the layers."""
    with rehearse(2) as recording:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU()).cuda()
        )
        loss = model(torch.randn(16, 32, device="cuda")).sum()
    outputs = [i for i in recording.storages.values() if i.nbytes == 4 * 16 * 64]
    assert outputs and not any(i.category is Category.COMMUNICATION for i in outputs)
    assert loss is not None


def test_fsdp_of_the_first_kind(rehearse):
    with rehearse(2) as recording:
        dist.init_process_group("nccl")
        model = FullyShardedDataParallel(
            nn.Linear(32, 64),
            device_id=torch.cuda.current_device(),
            use_orig_params=True,
        )
        held = train(model)
    assert Category.GATHERED_PARAMETER in by_category(recording)
    assert recording.steps == 2
    assert held


@pytest.mark.parametrize(("ranks", "notes"), [(8, 0), (6, 1)])
def test_ranks_that_no_mesh_has_are_noted(rehearse, ranks, notes):
    with rehearse(ranks) as recording:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (ranks // 4, 4), mesh_dim_names=("dp", "tp"))
        rows = mesh["tp"]
    assert sum("4 of the 6 ranks" in note for note in recording.notes) == notes
    assert rows.size() == 4


def works_of_backward(rehearse, take):
    """Of a hook that communicates in backward: what happens at the end of backward."""
    with rehearse(2) as recording:
        dist.init_process_group("nccl")
        model = nn.Linear(32, 64, bias=False).cuda()
        works = []

        def hook(parameter):
            works.append(take(dist.all_reduce(parameter.grad, async_op=True)))

        model.weight.register_post_accumulate_grad_hook(hook)
        model(torch.randn(16, 32, device="cuda")).sum().backward()
        end = len(recording.events)
        works[0].wait()
    (comm,) = (event for event in recording.events if isinstance(event, Comm))
    places = [p for p, e in enumerate(recording.events) if isinstance(e, Wait)]
    assert all(recording.events[place].comm == comm.number for place in places)
    return [place < end for place in places]


def test_a_work_that_a_hook_keeps_is_waited_for_by_whoever_has_it(rehearse):
    assert works_of_backward(rehearse, lambda work: work) == [False]


def test_a_future_that_a_hook_hands_on_is_waited_for_at_the_end_of_backward(rehearse):
    assert works_of_backward(rehearse, lambda work: work.get_future())[0]


@pytest.mark.parametrize(
    "hook", [default_hooks.allreduce_hook, default_hooks.bf16_compress_hook]
)
def test_communication_hooks_of_ddp(rehearse, hook):
    with rehearse(4) as recording:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(nn.Linear(32, 64).cuda(), device_ids=[0])
        model.register_comm_hook(None, hook)
        model(torch.randn(16, 32, device="cuda")).sum().backward()
        assert model.module.weight.grad.dtype == torch.float32
    comms = [event for event in recording.events if isinstance(event, Comm)]
    waits = {event.comm for event in recording.events if isinstance(event, Wait)}
    short = hook is default_hooks.bf16_compress_hook
    dtype = "bfloat16" if short else "float32"
    assert [spec.dtype for spec in comms[-1].inputs] == [dtype]
    assert comms[-1].number in waits


@pytest.mark.parametrize("offloads", [False, True])
def test_updates_on_the_host_are_noted(rehearse, offloads):
    with rehearse(2) as recording:
        dist.init_process_group("nccl")
        model = nn.Linear(64, 64).cuda()
        policy = CPUOffloadPolicy() if offloads else OffloadPolicy()
        fully_shard(model, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(16, 64, device="cuda")).sum().backward()
        optimizer.step()
    told = [note for note in recording.notes if "host's memory" in note]
    assert told == (
        [
            "The optimizer updates tensors in the host's memory, as with offloaded "
            "states: the seconds of its processor are not in the prediction."
        ]
        if offloads
        else []
    )


def test_what_autocast_kept_is_freed_in_the_order_in_which_it_was_made(rehearse):
    """Torch frees it by address, which would make two recordings of a script differ."""
    with rehearse() as recording:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40))).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(torch.randn(4, 8, device="cuda")).sum()
        loss.backward()
    runs = [
        list(run)
        for is_free, run in itertools.groupby(
            recording.events, lambda event: isinstance(event, Free)
        )
        if is_free
    ]
    (kept,) = [run for run in runs if len(run) >= 40]  # biases: backward needs weights
    assert kept[-40:] == sorted(kept[-40:])
