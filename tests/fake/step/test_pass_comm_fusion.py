"""Buckets of collectives: what goes into one, what does not, and why."""

import pytest
import torch
from comm_graphs import all_gather, all_reduce, captured, names, ops, reduce_scatter
from torch import nn
from training import train_silently

from torchspmd.comm import Phase
from torchspmd.errors import PassOrderError, PassWarning, UsageError
from torchspmd.step import DataParallel, compile
from torchspmd.step.graph.collectives import get_all_comm_blocks
from torchspmd.step.graph.metadata import owner_of
from torchspmd.step.passes import comm_fusion_with_concat, schedule_comm_wait
from torchspmd.testing import fake_mesh

KIB = 1 / 1024  # in MiB


@pytest.fixture(autouse=True)
def mesh():
    with fake_mesh(4, ("dp",)) as mesh:
        yield mesh


def reduced(*tensors):
    """Each tensor is made, reduced, and read at the end."""
    made = [all_reduce(tensor * 2) for tensor in tensors]
    return [each + 1 for each in made]


def ones(*sizes, dtype=torch.float32):
    return [torch.ones(size, dtype=dtype) for size in sizes]


def fuse(gm, size=1.0, first=None, **options):
    return comm_fusion_with_concat(gm, size, first_bucket_mb=first, **options).outcome


def bucket_sizes(gm):
    """Elements in each all-reduce, in graph order."""
    return [b.inputs[0].meta["val"].numel() for b in get_all_comm_blocks(gm)]


def test_it_fires():
    gm = captured(reduced, *ones(8, 24, (4, 2)))
    outcome = fuse(gm)
    assert (outcome.matched, outcome.changed, outcome.refused) == (3, 3, ())
    assert names(gm, "all_reduce") == ["all_reduce_default"]
    assert outcome.detail == (
        "all_reduce_default: 160 B from 3 (all_reduce, all_reduce_1, all_reduce_2)",
    )
    (block,) = get_all_comm_blocks(gm)
    assert block.event.payload_bytes == 160
    assert [tuple(node.meta["val"].shape) for node in block.outputs] == [
        *((8,), (24,), (4, 2))
    ]


def test_every_new_node_has_a_value_and_an_owner():
    gm = captured(reduced, *ones(8, 24))
    for number, start in enumerate(b.start for b in get_all_comm_blocks(gm)):
        owner = owner_of(start)._replace(phase=Phase.BACKWARD, module=f"Net.{number}")
        start.meta["torchspmd_owner"] = owner
    fuse(gm, layout="rank_major")
    assert all("val" in node.meta for node in gm.graph.nodes if node.op != "output")
    (block,) = get_all_comm_blocks(gm)
    for node in block.nodes:
        if not node.name.startswith("mul"):
            assert owner_of(node) == (Phase.BACKWARD, "Net"), node


def test_arguments_by_name():
    gm = captured(reduced, *ones(8, 8))
    for block in get_all_comm_blocks(gm):
        block.start.kwargs = {"group_name": "0", "reduce_op": "sum"}
        block.start.args = block.start.args[:1]
    assert fuse(gm).changed == 2
    (block,) = get_all_comm_blocks(gm)
    assert block.argument("reduce_op") == "sum" and block.group.axis == "dp"


def test_the_cap_is_never_exceeded_and_sizes_are_true():
    """The original took four bytes for every element and let the last tensor cross."""
    gm = captured(reduced, *ones(100, 100, 100, 100, 100, dtype=torch.bfloat16))
    outcome = fuse(gm, 400 / 2**20)
    assert bucket_sizes(gm) == [200, 200, 100]
    assert outcome.refused == (
        "all_reduce_4: alone in its bucket, no other of its kind is left",
    )
    assert names(gm, "all_reduce") == [
        *("all_reduce_default", "all_reduce_default_1", "all_reduce_4")
    ]


def test_tensors_that_are_all_above_the_cap_travel_alone():
    gm = captured(reduced, *ones(300, 400))
    with pytest.warns(PassWarning):
        outcome = fuse(gm, KIB)
    assert [line.split(":")[0] for line in outcome.refused] == [
        *("all_reduce", "all_reduce_1")
    ]


def test_a_tensor_above_the_cap_travels_alone():
    gm = captured(reduced, *ones(8, 300, 8))
    outcome = fuse(gm, KIB)
    assert outcome.refused == (
        "all_reduce_1: 1.17 KiB are more than a bucket of 1.00 KiB; it is sent alone",
    )
    assert names(gm, "all_reduce") == ["all_reduce_1", "all_reduce_default"]


def test_nothing_is_fused_where_every_tensor_is_above_the_cap():
    gm = captured(reduced, *ones(1024, 2048))
    with pytest.warns(PassWarning, match="all_reduce_1: 8.00 KiB are more than"):
        assert fuse(gm, KIB).changed == 0


def test_the_first_bucket_closes_early():
    gm = captured(reduced, *ones(64, 64, 64, 64, 64))
    fuse(gm, first=0.5 * KIB)
    assert bucket_sizes(gm) == [128, 192]


def test_buckets_of_the_first_users():
    """Five layers of 4096, 100 MB: the second bucket holds layers three and two."""
    layer = [(4096,), (4096, 4096)]
    with torch.device("meta"):
        tensors = [torch.empty(shape) for _ in range(5) for shape in layer]
    gm = captured(reduced, *tensors)
    report = comm_fusion_with_concat(gm, 100)
    assert [line.split(" from ")[1] for line in report.outcome.detail] == [
        "2 (all_reduce, all_reduce_1)",
        "3 (all_reduce_2, all_reduce_3, all_reduce_4)",
        "2 (all_reduce_5, all_reduce_6)",
        "2 (all_reduce_7, all_reduce_8)",
    ]
    assert "all_reduce_default_1" in names(gm, "all_reduce")


def test_a_single_collective_is_left_alone():
    gm = captured(reduced, *ones(8))
    with pytest.warns(PassWarning, match="changed nothing: all_reduce: alone in its"):
        fuse(gm)
    assert names(gm, "all_reduce", "cat") == ["all_reduce"]


def test_no_collective_at_all():
    gm = captured(lambda x: [x + 1], *ones(8))
    with pytest.warns(PassWarning, match="it found nothing to work on"):
        assert fuse(gm).matched == 0


def test_other_reductions_dtypes_and_groups_have_their_own_bucket(mesh):
    """The original took the last member's group and reduction for all, and promoted."""
    other = torch.distributed.new_group([0, 1]).group_name

    def function(*tensors):
        kinds = [("sum", "0"), ("max", "0"), ("sum", other)] * 2
        made = [all_reduce(t * 2, *k) for t, k in zip(tensors[:6], kinds, strict=True)]
        made += [all_reduce(t * 2) for t in tensors[6:]]
        return [each + 1 for each in made]

    gm = captured(function, *ones(*[8] * 6), *ones(4, 4, dtype=torch.bfloat16))
    assert fuse(gm).changed == 8
    blocks = get_all_comm_blocks(gm)
    found = {(b.argument("reduce_op"), b.group.name, b.event.dtype) for b in blocks}
    assert len(blocks) == 4 and found == {
        *(("sum", "0", "float32"), ("max", "0", "float32")),
        *(("sum", other, "float32"), ("sum", "0", "bfloat16")),
    }
    outputs = [node.meta["val"].dtype for block in blocks for node in block.outputs]
    assert outputs.count(torch.bfloat16) == 2


def test_a_result_that_is_read_in_between_ends_the_bucket():
    """The original moved its reader behind the bucket and failed in lint."""

    def function(x, y, z, u):
        first, second = all_reduce(x * 2), all_reduce(y * 2)
        norm = first.norm() + second.norm()
        third, fourth = all_reduce(z * norm), all_reduce(u * 2)
        return [first, second, third, fourth]

    gm = captured(function, *ones(8, 8, 8, 8))
    outcome = fuse(gm)
    assert outcome.changed == 4
    order = names(gm, "all_reduce", "norm", "add")
    assert order[0] == "all_reduce_default" and order[-1] == "all_reduce_default_1"
    assert "linalg_vector_norm" in order


def test_a_result_that_is_read_at_once_is_left_out():
    def function(x, y, z):
        first = all_reduce(x * 2)
        second = all_reduce(y * 2) + 1  # accumulated
        return [first, second, all_reduce(z * 2)]

    gm = captured(function, *ones(8, 8, 8))
    outcome = fuse(gm)
    assert outcome.changed == 2
    assert outcome.refused == (
        "all_reduce_1: add reads its result before the next one starts",
    )


def test_a_collective_on_a_result_does_not_join_it():
    def function(x, y):
        return [all_reduce(all_reduce(x * 2) / 4), all_reduce(y)]

    gm = captured(function, *ones(8, 8))
    fuse(gm)
    assert bucket_sizes(gm) == [8, 16]


def test_scaled_results_still_share_a_bucket():
    """Averages: all are divided alike, so that the bucket is divided once."""

    def function(x, y):
        first = all_reduce(x * 2) / 4
        second = all_reduce(y * 2) / 4
        return [first + 1, second + 1]

    gm = captured(function, *ones(8, 8))
    assert fuse(gm).changed == 2
    assert names(gm, "all_reduce", "div") == ["all_reduce_default", "div_tensor"]


def test_reduce_scatters_and_all_gathers():
    def function(x, y, u, v):
        scattered = [reduce_scatter(each * 2, 4) for each in (x, y)]
        gathered = [all_gather(each * 2, 4) for each in (u, v)]
        return [each + 1 for each in (*scattered, *gathered)]

    gm = captured(function, *ones((8, 3), 4, (2, 3), 1))
    outcome = fuse(gm)
    # A ring over four elements has chunks of two, and a rank's part is one.
    assert outcome.changed == 4 and outcome.keeps_bits == ("rank",)
    scatter, gather = get_all_comm_blocks(gm)
    assert scatter.start.name == "reduce_scatter_tensor_default"
    assert [tuple(n.meta["val"].shape) for n in scatter.outputs] == [(2, 3), (1,)]
    assert gather.start.name == "all_gather_into_tensor_default"
    assert [tuple(n.meta["val"].shape) for n in gather.outputs] == [(8, 3), (4,)]


@pytest.mark.parametrize(
    ("sizes", "layout", "kept"),
    [
        ((24, 16), "plain", ("rank", "ring")),
        ((24, 4), "rank_major", ("rank",)),
        ((524_288 * 8, 8000, 8), "plain", ("rank",)),  # several segments, cut unevenly
        ((524_288 * 8, 8000, 8), "rank_major", ("rank", "ring")),
    ],
)
def test_when_scattered_sums_keep_bits(sizes, layout, kept):
    def function(*tensors):
        return [each + 1 for each in [reduce_scatter(t, 4) for t in tensors]]

    with torch.device("meta"):
        gm = captured(function, *ones(*sizes))
    assert fuse(gm, 100, layout=layout).keeps_bits == kept


@pytest.mark.parametrize("layout", ["plain", "rank_major"])
def test_what_leaves_the_graph_is_a_copy(layout):
    """Else a gradient that is kept would hold its whole bucket."""

    def function(x, y, z):
        return [all_reduce(each * 2) for each in (x, y, z)]

    gm = captured(function, *ones(8, (3, 3), 16))
    fuse(gm, layout=layout)
    found = gm(*ones(8, (3, 3), 16))
    assert [tuple(each.shape) for each in found] == [(8,), (3, 3), (16,)]
    assert len({each.untyped_storage().data_ptr() for each in found}) == 3


def test_gathers_of_inputs_start_with_the_first_of_their_bucket():
    def function(x, *shards):
        for each in shards:  # read before the next one starts
            x = x * all_gather(each, 4)
        return [x]

    gm = captured(function, *ones(8, 2, 2, 2))
    outcome = comm_fusion_with_concat(gm, 64 / 2**20, first_bucket_mb=None).outcome
    assert outcome.keeps_bits == ("rank", "ring", "tree")
    assert names(gm, "all_gather", "mul") == [
        "all_gather_into_tensor_default",
        "mul",
        "mul_1",
        "all_gather_into_tensor_2",
        "mul_2",
    ]
    assert outcome.refused == (
        "all_gather_into_tensor_2: alone in its bucket, no other of its kind is left",
    )


@pytest.mark.parametrize(
    ("layout", "kept"), [("plain", ("rank",)), ("rank_major", ("rank", "ring"))]
)
def test_what_is_claimed_about_bits(layout, kept):
    gm = captured(reduced, *ones(7, 33, 8))
    assert fuse(gm, layout=layout).keeps_bits == kept
    outputs = get_all_comm_blocks(gm)[0].outputs
    assert [node.meta["val"].numel() for node in outputs] == [7, 33, 8]


def test_a_bucket_starts_behind_its_last_input_and_overtakes_nothing():
    def function(x, y, z):
        a, b, c = x * 2, y * 2, z * 2
        total = (a + 1).sum()
        biggest = all_reduce(c, "max")
        return [all_reduce(a), all_reduce(b), biggest, total]

    gm = captured(function, *ones(8, 8, 8))
    fuse(gm)
    order = names(gm, "mul", "all_reduce", "sum")
    assert order.index("all_reduce_default") == order.index("all_reduce") + 1


def test_what_is_not_fused_says_so():
    def function(x, y, empty):
        both = ops.all_reduce_coalesced([x, y], "sum", "0")
        made = [ops.wait_tensor(each) for each in both]
        number = all_gather(x.sum(), 4)
        return [*made, all_reduce(empty), ops.all_reduce(x, "sum", "0"), number]

    gm = captured(function, *ones(8, 8, 0))
    with pytest.warns(PassWarning):
        assert fuse(gm).refused == (
            "all_reduce_coalesced: only plain functional collectives of one tensor are "
            "fused",
            "all_gather_into_tensor: it gathers single numbers",
            "all_reduce: it sends nothing",
            "all_reduce_1: nothing waits for it",
        )


def test_a_graph_that_writes_in_place_is_refused():
    gm = captured(lambda x, y: [*reduced(x, y), x.add_(1)], *ones(8, 8))
    with pytest.warns(PassWarning, match="add_.* writes in place: fuse before new"):
        fuse(gm)


def test_wrong_arguments_are_named_together_and_nothing_is_edited():
    gm = captured(reduced, *ones(8, 8))
    code = gm.code
    with pytest.raises(UsageError) as caught:
        comm_fusion_with_concat(gm, 0, first_bucket_mb=-1, layout="diagonal")
    assert str(caught.value) == (
        "comm_fusion_with_concat: bucket_size_mb=0: a bucket needs a size above 0, a "
        "finite number of MiB (for one bucket, more than all gradients have); "
        "first_bucket_mb=-1: use more than 0, a finite number of MiB, or None; "
        "layout='diagonal': choose 'plain' or 'rank_major'."
    )
    assert gm.code == code


def test_fusing_after_scheduling_is_too_late():
    gm = captured(reduced, *ones(8, 8))
    schedule_comm_wait(gm)
    with pytest.raises(PassOrderError, match="must be applied after comm_fusion"):
        fuse(gm)


@pytest.mark.parametrize("mode", [None, DataParallel("replicate", reduce="avg")])
def test_a_training_step(mesh, mode):
    reports = []

    def transformation(gm):
        reports.append(fuse(gm))
        return gm

    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    optim = torch.optim.AdamW(model.parameters(), foreach=True)
    compiled = compile(parallel_mode=mode, mesh=mesh, gm_transformation=transformation)(
        train_silently
    )
    compiled(model, optim, torch.randn(3, 8))
    assert reports[0].changed == 6
    ledger = compiled.programs[0].ledger
    total = ledger.total(kind="all_reduce", phase="backward")
    assert total.count == 1
    assert total.payload_bytes == sum(p.numel() for p in model.parameters()) * 4
    (module,) = ledger.total_by("module", phase="backward")
    assert module == ("Sequential",)
