"""Every way to communicate is seen, with its kind, bytes, group, phase and cause."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from torchspmd import CommDebugMode, Kind, Phase
from torchspmd.comm import Total, marked_as_check
from torchspmd.parallel.clip import clip_grad_norm_
from torchspmd.testing import fake_mesh
from torchspmd.trace.tables import ON_FIRST_DDP_STEP

c10d, functional = torch.ops.c10d, torch.ops.c10d_functional


@pytest.fixture
def mesh():
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        yield mesh


def x(*shape):
    return torch.ones(*(shape or (8,)))


WORLD = 8

IN_PLACE = [
    (lambda: dist.all_reduce(x()), c10d.allreduce_, Kind.ALL_REDUCE, 32, 56),
    (lambda: dist.broadcast(x(), 0), c10d.broadcast_, Kind.BROADCAST, 32, 28),
    (lambda: dist.reduce(x(), 0), c10d.reduce_, Kind.REDUCE, 32, 28),
    (
        lambda: dist.all_gather([x() for _ in range(WORLD)], x()),
        c10d.allgather_,
        Kind.ALL_GATHER,
        256,
        224,
    ),
    (
        lambda: dist.reduce_scatter(x(), [x() for _ in range(WORLD)]),
        c10d.reduce_scatter_,
        Kind.REDUCE_SCATTER,
        256,
        224,
    ),
    (
        lambda: dist.all_to_all_single(x(), x()),
        c10d.alltoall_base_,
        Kind.ALL_TO_ALL,
        32,
        28,
    ),
    (
        lambda: dist.gather(x(), [x() for _ in range(WORLD)], dst=0),
        c10d.gather_,
        Kind.GATHER,
        256,
        28,
    ),
    (
        lambda: dist.scatter(x(), [x() for _ in range(WORLD)], src=0),
        c10d.scatter_,
        Kind.SCATTER,
        256,
        28,
    ),
    (lambda: dist.send(x(), 1), c10d.send, Kind.SEND, 32, 32),
    (lambda: dist.recv(x(), 1), c10d.recv_, Kind.RECV, 32, 0),
    (dist.barrier, c10d.barrier, Kind.BARRIER, 0, 0),
]


@pytest.mark.parametrize(
    ("call", "packet", "kind", "payload", "wire"), IN_PLACE, ids=lambda v: str(v)[:20]
)
def test_torch_distributed_calls(mesh, call, packet, kind, payload, wire):
    with CommDebugMode() as mode:
        call()
    assert mode.get_comm_counts() == {packet: 1}
    (event,) = mode.ledger.events
    assert (event.kind, event.payload_bytes, event.wire_bytes) == (kind, payload, wire)
    assert event.group.ranks == tuple(range(WORLD))


native, autograd = torch.ops._c10d_functional, torch.ops._c10d_functional_autograd

FUNCTIONAL = [
    (lambda g: native.all_reduce(x(), "sum", g), "all_reduce", 32),
    (lambda g: native.all_reduce_(x(), "sum", g), "all_reduce", 32),
    (
        lambda g: native.all_reduce_coalesced([x(), x(4)], "sum", g),
        "all_reduce_coalesced",
        48,
    ),
    (lambda g: native.all_gather_into_tensor(x(), 4, g), "all_gather_into_tensor", 128),
    (
        lambda g: native.all_gather_into_tensor_out(x(), 4, g, out=x(32)),
        "all_gather_into_tensor",
        128,
    ),
    (
        lambda g: native.all_gather_into_tensor_coalesced([x(), x(4)], 4, g),
        "all_gather_into_tensor_coalesced",
        192,
    ),
    (
        lambda g: native.reduce_scatter_tensor(x(), "sum", 4, g),
        "reduce_scatter_tensor",
        32,
    ),
    (
        lambda g: native.all_to_all_single(x(), [2] * 4, [2] * 4, g),
        "all_to_all_single",
        32,
    ),
    (
        lambda g: autograd.all_to_all_single(x(), [2] * 4, [2] * 4, g),
        "all_to_all_single",
        32,
    ),
    (lambda g: native.broadcast(x(), 0, g), "broadcast", 32),
]


@pytest.mark.parametrize(("call", "name", "payload"), FUNCTIONAL)
def test_functional_collectives(mesh, call, name, payload):
    with CommDebugMode() as mode:
        call(mesh.get_group("tp").group_name)
    assert mode.get_comm_counts() == {getattr(functional, name): 1}
    (event,) = mode.ledger.events
    assert (event.payload_bytes, event.axis) == (payload, "tp")
    assert event.group.ranks == (0, 1, 2, 3)


def test_a_missing_key_reads_zero_and_counts_are_copies(mesh):
    with CommDebugMode() as mode:
        dist.all_reduce(x())
        counts = mode.get_comm_counts()
        dist.all_reduce(x())
    assert counts[c10d.allreduce_] == 1
    assert counts[functional.all_gather_into_tensor] == 0
    assert mode.get_total_counts() == 2


def test_batched_sends_and_receives(mesh):
    with CommDebugMode() as mode:
        dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x(), 1), dist.P2POp(dist.irecv, x(), 1)]
        )
    assert mode.get_comm_counts() == {c10d.send: 1, c10d.recv_: 1}


def test_redistribution_that_dtensor_chose_is_implicit(mesh):
    """pytorch #167106: a gather that nobody asked for, found only through asserts."""
    tp = mesh["tp"]
    tensor = distribute_tensor(x(8, 8), tp, [Shard(0)], src_data_rank=None)
    with CommDebugMode() as mode:
        torch.mm(tensor, tensor)
        tensor.redistribute(placements=[Replicate()])
        tensor.full_tensor()
    assert [(event.implicit, event.cause) for event in mode.ledger.events] == [
        (True, "aten.mm.default: Shard(0) -> Replicate"),
        (False, None),
        (False, None),
    ]


def test_source_line_and_layouts_when_asked(mesh):
    tensor = distribute_tensor(x(8, 8), mesh["tp"], [Shard(0)], src_data_rank=None)
    with CommDebugMode(sources=True) as mode:
        tensor.full_tensor()
    (event,) = mode.ledger.events
    path, _, rest = event.source.rpartition(":")
    assert path.endswith("test_trace_kinds.py")
    assert rest.split()[1] == "test_source_line_and_layouts_when_asked"
    assert event.cause == "Shard(0) -> Replicate"


def test_shard_dim_alltoall(mesh):
    group = mesh.get_group("tp").group_name
    with CommDebugMode() as mode:
        torch.ops._dtensor.shard_dim_alltoall(
            torch.empty(2, 8, device="meta"), 0, 1, group
        )
    assert mode.get_comm_counts() == {torch.ops._dtensor.shard_dim_alltoall: 1}
    (event,) = mode.ledger.events
    assert (event.kind, event.payload_bytes) == (Kind.ALL_TO_ALL, 64)


def test_fake_and_meta_tensors(mesh):
    """Upstream lists no operators under fake tensors, without a word."""
    group = mesh.get_group("tp")
    with CommDebugMode(operations=True) as mode:
        with FakeTensorMode():
            for _ in range(3):  # the fake mode's cache must not hide repetitions
                funcol.all_reduce(torch.empty(1024, 1024), "sum", group)
        funcol.all_reduce(torch.empty(4, device="meta"), "sum", group)
    assert mode.ledger.total().payload_bytes == 3 * 4 * 1024**2 + 16
    assert len(mode.operations) > 0


def test_optimizer_and_clipping_are_phase_optimizer(mesh):
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh["dp"])

    class Reducing(torch.optim.SGD):
        def step(self, closure=None):
            dist.all_reduce(x())
            return super().step(closure)

    optimizer = Reducing(model.parameters(), lr=0.1)
    model(x(2, 8)).sum().backward()
    with CommDebugMode() as mode:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert mode.ledger.total().count == mode.ledger.total(phase="optimizer").count == 2


def test_failing_optimizer_does_not_keep_its_phase(mesh):
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no step")

    optimizer = Fails([nn.Parameter(x())], lr=0.1)
    with CommDebugMode() as mode:
        with pytest.raises(ValueError, match="no step"):
            optimizer.step()
        dist.all_reduce(x())
    assert [event.phase for event in mode.ledger.events] == [Phase.FORWARD]


def test_closure_of_an_optimizer_is_not_its_phase(mesh):
    class Reduces(nn.Module):
        def forward(self, value):
            dist.all_reduce(value.detach())
            return value

    model, weight = Reduces(), nn.Parameter(x())
    weight.register_hook(dist.all_reduce)

    def closure():
        loss = model(weight).sum()
        loss.backward()
        return loss

    with CommDebugMode() as mode:
        torch.optim.SGD([weight], lr=0.1).step(closure)
    assert [event.phase for event in mode.ledger.events] == [
        Phase.FORWARD,
        Phase.BACKWARD,
    ]


def test_communication_of_other_threads_is_seen(mesh):
    import threading

    with CommDebugMode() as mode:
        thread = threading.Thread(target=lambda: dist.all_reduce(x()))
        thread.start()
        thread.join()
    assert len(mode.ledger) == 1


def test_an_operator_that_the_table_does_not_know_is_shown(mesh):
    library = torch.library.Library("c10d", "FRAGMENT")
    try:
        library.define("torchspmd_new_op(Tensor x) -> Tensor")
        library.impl("torchspmd_new_op", lambda x: x.clone(), "CPU")
        with CommDebugMode() as mode:
            torch.ops.c10d.torchspmd_new_op(x())
    finally:
        library._destroy()
    (event,) = mode.ledger.events
    assert (event.kind, event.op) == (Kind.UNKNOWN, "c10d.torchspmd_new_op")
    assert "torchspmd_new_op is an operator that torchspmd does not know" in "".join(
        mode.ledger.notes
    )


def test_checks_are_marked_and_can_be_left_out(mesh):
    with CommDebugMode() as mode:
        dist.all_reduce(x())
        with marked_as_check():
            dist.all_reduce(x())
    assert mode.get_total_counts() == 2
    assert mode.get_total_counts(checks=False) == 1
    assert mode.ledger.total(check=True).count == 1


def test_flattened_and_unnamed_groups(mesh):
    pair = dist.new_group([0, 5])
    unnamed = init_device_mesh("cpu", (4, 2))
    with CommDebugMode() as mode:
        dist.all_reduce(x(), group=pair)
        dist.all_reduce(x(), group=unnamed.get_group(1))
    assert [event.axis for event in mode.ledger.events] == ["ranks 0,5", "ranks 0,1"]


def test_nothing_is_recorded_outside(mesh):
    mode = CommDebugMode()
    with mode:
        dist.all_reduce(x())
    dist.all_reduce(x())
    assert len(mode.ledger) == 1
    before = mode.ledger
    with mode:
        pass
    assert (len(before), len(mode.ledger)) == (1, 0)


@pytest.mark.parametrize(
    "clip", [clip_grad_norm_, nn.utils.clip_grad_norm_], ids=["own", "torch"]
)
def test_clipping_is_part_of_the_optimizer(mesh, clip):
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh["tp"], [Shard(0)]))
    weight.grad = torch.ones_like(weight)
    with CommDebugMode() as mode:
        clip([weight], 1.0)
    assert {event.phase for event in mode.ledger.events} == {Phase.OPTIMIZER}


def test_the_first_step_of_ddp_is_a_line_in_the_ledger():
    with fake_mesh(2, ("dp",)):
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        notes = []
        for _ in range(2):
            with CommDebugMode() as mode:
                model(x(2, 4)).sum().backward()
            notes.append(list(mode.ledger.notes))
    assert notes == [[ON_FIRST_DDP_STEP], []]


# ----------------------------------------------------------------------------
# Bytes equal the closed formulas, exactly.


BATCH, SEQ, WIDTH, HIDDEN, LAYERS, FLOAT = 2, 12, 24, 48, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def model():
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def activation(seq=SEQ):
    return torch.randn(BATCH, seq, WIDTH, requires_grad=True)


ACTIVATION = BATCH * SEQ * WIDTH * FLOAT
PARAMETERS = sum(p.numel() for p in Block().parameters()) * FLOAT


def ring_all_reduce(payload, n):
    return 2 * (n - 1) * payload // n


def ring_shard(payload, n):
    return (n - 1) * payload // n


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_tensor_parallel(n):
    with fake_mesh(n, ("tp",)) as mesh:
        plan = {"*.mlp.0": ColwiseParallel(), "*.mlp.2": RowwiseParallel()}
        parallel = parallelize_module(model(), mesh, plan)
        with CommDebugMode() as mode:
            parallel(activation()).sum().backward()
    # One reduction of the activation a block, forward and backward.
    for phase in ("forward", "backward"):
        assert mode.ledger.total(kind="all_reduce", phase=phase, axis="tp") == Total(
            LAYERS, LAYERS * ACTIVATION, LAYERS * ring_all_reduce(ACTIVATION, n)
        )
    assert len(mode.ledger) == 2 * LAYERS


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sequence_parallel(n):
    with fake_mesh(n, ("tp",)) as mesh:
        plan = {
            "*.norm": SequenceParallel(),
            "*.mlp": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate()
            ),
            "*.mlp.0": ColwiseParallel(),
            "*.mlp.2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallel = parallelize_module(model(), mesh, plan)
        with CommDebugMode() as mode:
            parallel(activation(SEQ // n)).sum().backward()
    # A gather and a scatter of the activation a block, forward and backward.
    each = Total(LAYERS, LAYERS * ACTIVATION, LAYERS * ring_shard(ACTIVATION, n))
    for phase in ("forward", "backward"):
        for kind in ("all_gather", "reduce_scatter"):
            assert mode.ledger.total(kind=kind, phase=phase) == each
    assert len(mode.ledger) == 4 * LAYERS


@pytest.mark.parametrize("n", [2, 3, 8])
def test_ddp(n):
    with fake_mesh(n, ("dp",)) as mesh:
        replicated = DistributedDataParallel(
            model(), process_group=mesh.get_group(), init_sync=False
        )
        with CommDebugMode() as mode:
            replicated(activation()).sum().backward()
    gradients = LAYERS * PARAMETERS
    assert mode.ledger.total() == Total(1, gradients, ring_all_reduce(gradients, n))
    assert mode.ledger.total(kind="all_reduce", phase="backward", axis="dp").count == 1


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2(n, reshard):
    with fake_mesh(n, ("dp",)) as mesh:
        sharded = model()
        for block in sharded:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        with CommDebugMode() as mode:
            sharded(activation()).sum().backward()
    gathers = LAYERS if not reshard else 2 * LAYERS
    assert mode.ledger.total(kind="all_gather") == Total(
        gathers, gathers * PARAMETERS, gathers * ring_shard(PARAMETERS, n)
    )
    assert mode.ledger.total(kind="reduce_scatter", phase="backward") == Total(
        LAYERS, LAYERS * PARAMETERS, LAYERS * ring_shard(PARAMETERS, n)
    )
    # Each block's parameters count for the block, although gathers are issued ahead.
    for place in range(LAYERS):
        inside = mode.ledger.total(kind="all_gather", module=f"Sequential.{place}")
        assert inside.count == gathers // LAYERS
