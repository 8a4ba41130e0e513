"""The account of a recording: by hand, on a device that is as small as is needed."""

import dataclasses

import pytest

from torchspmd.predict.allocator import MIB, AllocatorSettings
from torchspmd.predict.hardware import Figure, Hardware, load_gpu
from torchspmd.predict.memory import Fits, Period, count_memory
from torchspmd.predict.suggestions import suggest
from torchspmd.predict.text import describe_memory, size_text
from torchspmd.rehearse.recording import (
    Alloc,
    Category,
    Comm,
    EventRecord,
    Free,
    Mark,
    MarkKind,
    Op,
    Phase,
    Recording,
    RecordStream,
    Site,
    StorageInfo,
    Synchronize,
    TensorSpec,
)

CUBLAS = 32 * MIB


def gpu(total: int = 1024 * MIB, **figures: int) -> Hardware:
    """An H100 with little memory, and nothing beside tensors but what is given."""
    h100 = load_gpu("h100")
    zero = dict.fromkeys(
        (key for key in h100.figures if key.startswith("memory.")), Figure(0, "test")
    )
    given = {f"memory.{key}": Figure(value, "test") for key, value in figures.items()}
    return dataclasses.replace(
        h100,
        name="small",
        figures={**zero, "memory.total": Figure(total, "test"), **given},
    )


class Script:
    """Writes a recording, storage by storage."""

    def __init__(self, **fields) -> None:
        self.recording = Recording(**fields)
        self.step, self.phase = 0, Phase.INIT

    def add(self, *events) -> None:
        self.recording.events += events

    def site(self, module: str = "") -> Site:
        return Site(module, self.phase, self.step, f"train.py:{len(module)} main")

    def alloc(
        self, mib: float, category=Category.TEMPORARY, module="", **fields
    ) -> int:
        storage = len(self.recording.storages)
        stream, nbytes = fields.pop("stream", 0), int(mib * MIB)
        site = self.site(module)
        self.recording.storages[storage] = StorageInfo(
            nbytes, category, module=module, site=site, **fields
        )
        self.add(Alloc(storage, nbytes, stream, -1, site))
        return storage

    def op(self, name: str, *shapes: tuple[int, ...], stream=0, module="") -> None:
        inputs = tuple(
            TensorSpec(s, (1,) * len(s), "float32", "cuda", 0) for s in shapes
        )
        self.add(Op(0, name, inputs, (), (), stream, self.site(module)))

    def comm(self, group: str) -> None:
        fields = ("c10d.allreduce_", group, (0, 1), None, 4, "float32", (), ())
        self.add(Comm(0, "all_reduce", *fields, 0, 1, False, -1, self.site()))

    def free(self, *storages: int) -> None:
        self.add(*(Free(storage) for storage in storages))


def train(steps: int = 3, blocks: int = 4, **fields) -> Recording:
    """AdamW on blocks of 10 MiB of weights with 3 activations of 20 MiB each."""
    script = Script(**fields)
    weights = [
        script.alloc(10, Category.PARAMETER, f"Net.layers.{i}") for i in range(blocks)
    ]
    script.add(Mark(MarkKind.INIT_END, 0))
    for step in range(steps):
        script.step = step
        script.add(Mark(MarkKind.STEP_BEGIN, step))
        script.phase = Phase.FORWARD
        saved = [
            script.alloc(20, module=f"Net.layers.{i}", saved=True)
            for i in range(blocks)
            for _ in range(3)
        ]
        script.phase = Phase.BACKWARD
        gradients = []
        for i in reversed(range(blocks)):
            gradients.append(script.alloc(10, Category.GRADIENT, f"Net.layers.{i}"))
            script.free(*saved[3 * i : 3 * i + 3])
        script.phase = Phase.OPTIMIZER
        if not step:
            for i in range(blocks):
                script.alloc(20, Category.OPTIMIZER_STATE, f"Net.layers.{i}")
        script.free(script.alloc(40))
        script.add(Mark(MarkKind.STEP_END, step))
        script.phase = Phase.OTHER
        script.free(*gradients)
    script.free(*weights)
    script.recording.steps = steps
    return script.recording


def test_peaks_of_initialisation_first_and_steady_step():
    account = count_memory(train(), gpu())
    peaks = {period: peak.allocated // MIB for period, peak in account.peaks.items()}
    assert peaks == {
        Period.INITIALISATION: 40,  # weights
        Period.FIRST_STEP: 290,  # with activations and the first gradient
        Period.STEADY_STEP: 370,  # with optimizer state
    }
    assert account.peak_period is Period.STEADY_STEP
    assert account.steady == 120 * MIB  # weights and optimizer state
    assert account.by_category() == {
        "activation": 240 * MIB,
        "optimizer state": 80 * MIB,
        "parameter": 40 * MIB,
        "gradient": 10 * MIB,
    }
    assert account.peak.site.phase is Phase.BACKWARD
    assert account.peak.site.module == "Net.layers.3"
    assert account.fits is Fits.YES


def test_categories_add_up_at_every_row():
    account = count_memory(train(steps=1), gpu())
    for row in range(len(account.curve)):
        assert sum(account.by_category(row).values()) == account.curve.allocated[row]


def test_holders_are_added_up_by_module_and_line():
    account = count_memory(train(), gpu())
    first = account.holders()[0]
    assert (first.nbytes, first.storages) == (60 * MIB, 3)
    assert first.category == "activation"
    assert first.module.startswith("Net.layers.")
    assert first.line == "train.py:12 main"
    assert sum(each.nbytes for each in account.holders(most=99)) == 370 * MIB


def test_one_step_alone_has_no_steady_peak():
    account = count_memory(train(steps=1), gpu())
    assert account.steady == 160 * MIB  # gradients are there at its end
    assert account.peak_period is Period.FIRST_STEP


def test_an_empty_recording_fits():
    account = count_memory(Recording(), gpu())
    assert (account.peak.allocated, account.reserved_peak, account.steady) == (0, 0, 0)
    assert account.fits is Fits.YES
    assert account.fragmentation == 0
    assert suggest(account) == []
    assert "Fits on" in describe_memory(account)


def test_cublas_takes_a_workspace_for_each_thread_and_stream_once():
    script = Script()
    device = gpu(cublas_workspace=CUBLAS, cublaslt_workspace=MIB, cublas_handle=2 * MIB)
    script.phase = Phase.FORWARD
    script.op("aten.mm.default", (4, 4), (4, 4))
    script.op("aten.mm.default", (4, 4), (4, 4))
    script.op("aten.add.Tensor", (4, 4), (4, 4))
    assert count_memory(script.recording, device).by_category() == {"workspace": CUBLAS}
    script.phase = Phase.BACKWARD
    script.op("aten.bmm.default", (4, 4, 4), (4, 4, 4))
    script.op("aten.mm.default", (4, 4), (4, 4), stream=2)
    account = count_memory(script.recording, device)
    assert account.by_category() == {"workspace": 3 * CUBLAS}
    assert [part.name for part in account.fixed] == ["cuBLAS, 3 handles"]
    script.phase = Phase.FORWARD
    script.op("aten.addmm.default", (4, 4), (4, 4), (4, 4))  # no bias
    script.op("aten.addmm.default", (4,), (4, 4), (4, 4))
    account = count_memory(script.recording, device)
    assert account.by_category() == {"workspace": 3 * CUBLAS + MIB}
    assert account.holders()[-1].name == "cuBLASLt workspace"


def test_communicators_take_memory_of_the_device_when_first_used():
    script = Script()
    device = gpu(
        200 * MIB, context=10 * MIB, nccl_library=20, nccl_communicator=60 * MIB
    )
    script.comm("dp")
    script.comm("dp")
    script.alloc(100)
    assert count_memory(script.recording, device).margin == 30 * MIB - 20
    script.comm("tp")
    account = count_memory(script.recording, device)
    names = ["CUDA context", "NCCL, kernels", "NCCL, 2 communicators"]
    assert [part.name for part in account.fixed] == names
    assert account.margin == -30 * MIB - 20


def test_the_first_allocation_that_fails_is_named():
    script = Script()
    script.alloc(60, Category.PARAMETER)
    script.phase = Phase.FORWARD
    script.op("aten.relu.default", (4,), module="Net.mlp")
    script.alloc(50, module="Net.mlp")
    script.alloc(200)
    account = count_memory(script.recording, gpu(105 * MIB, context=4 * MIB))
    assert account.fits is Fits.NO
    failure = account.failure
    assert (failure.nbytes, failure.allocated) == (50 * MIB, 60 * MIB)
    assert (failure.site.module, failure.op) == ("Net.mlp", "aten.relu.default")
    assert account.margin == (105 - 4 - 310) * MIB  # all of it is counted
    text = describe_memory(account)
    assert text.startswith(
        "OUT OF MEMORY on NVIDIA H100 SXM 80GB: 50.00 MiB are asked for in Net.mlp, "
        "forward of step 0 at train.py:7 main by aten.relu.default, with 60.00 MiB "
        "allocated, 60.00 MiB reserved and 4.00 MiB taken by CUDA and NCCL, of 105.00 MiB."
    )
    assert "would need 209.00 MiB more" in text


@pytest.mark.parametrize(
    ("total", "fits"), [(400, Fits.YES), (385, Fits.AT_RISK), (365, Fits.NO)]
)
def test_the_verdict_leaves_room_for_its_own_error(total, fits):
    account = count_memory(train(), gpu(total * MIB))
    assert account.fits is fits


def test_a_flushed_cache_is_a_risk():
    script = Script()
    script.free(script.alloc(60))
    script.alloc(70)
    account = count_memory(script.recording, gpu(100 * MIB))
    assert (account.fits, account.retries) == (Fits.AT_RISK, 1)
    assert "gives its cache back 1 times" in describe_memory(account)


@pytest.mark.parametrize(
    ("event", "reserved"),
    [
        (None, 40),
        (Synchronize(None, None, "synchronize"), 20),
        (Synchronize(1, None, "Stream.synchronize"), 20),
        (Synchronize(2, None, "Stream.synchronize"), 40),
        (Synchronize(None, 7, "Event.synchronize"), 20),
        (Mark(MarkKind.STEP_END, 0), 20),
    ],
)
def test_a_recorded_stream_keeps_a_block_until_the_host_waited(event, reserved):
    script = Script()
    storage = script.alloc(20)
    script.add(RecordStream(storage, 1), EventRecord(7, 1))
    script.free(storage)
    script.add(*(event,) if event else ())
    script.alloc(20)
    assert count_memory(script.recording, gpu()).reserved_peak == reserved * MIB


def test_a_storage_that_is_resized_frees_its_old_block():
    script = Script()
    storage = script.alloc(20)
    script.add(Alloc(storage, 40 * MIB, 0, -1, script.site()))
    script.add(Alloc(storage, 0, 0, -1, script.site()))
    account = count_memory(script.recording, gpu())
    assert account.curve.allocated[-1] == 0
    assert account.peak.allocated == 40 * MIB


def test_emptying_the_cache_is_simulated():
    script = Script()
    script.free(script.alloc(20))
    script.add(Mark(MarkKind.EMPTY_CACHE, 0))
    script.alloc(10)
    assert count_memory(script.recording, gpu()).curve.reserved[-1] == 10 * MIB


def test_settings_of_the_allocator_are_used():
    settings = AllocatorSettings(expandable_segments=True)
    account = count_memory(train(), gpu(), settings)
    assert account.reserved_peak % (20 * MIB) == 0
    assert account.settings is settings


def test_the_curve_is_thinned_without_losing_its_peak():
    account = count_memory(train(), gpu())
    points = account.points(most=7)
    assert len(points) <= 7
    assert max(allocated for _, allocated, _ in points) == account.peak.allocated


def test_the_figures_as_json():
    data = count_memory(train(), gpu()).as_json()
    assert data["allocated_peak_bytes"] == 370 * MIB
    assert data["steady_bytes"] == 120 * MIB
    assert data["peak_phase"] == "steady step"
    assert data["peak_at"]["phase"] == "backward"
    assert sum(data["by_category"].values()) == data["allocated_peak_bytes"]
    assert data["first_failure"] is None
    assert list(data["periods"]) == ["initialisation", "first step", "steady step"]


# ----------------------------------------------------------------------------
# Suggestions


def saved(recording: Recording) -> dict[str, int]:
    account = count_memory(recording, gpu())
    return {each.text: each.saved_bytes // MIB for each in suggest(account)}


def test_what_lowers_the_peak_is_counted_again():
    found = saved(train())
    # 240 of activations become 4 inputs of 20 and one block of 60
    assert (
        found["checkpoint the activations of Net.layers.* (torch.utils.checkpoint)"]
        == 100
    )
    # the 130 MiB of states become 1/8 of that; two blocks of 10 are gathered
    sharded = next(each for each in found if each.startswith("shard"))
    assert "on the 8 GPUs of a node" in sharded
    assert found[sharded] == 93
    assert (
        found[next(each for each in found if each.startswith("half the batch"))] == 120
    )
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_sharding_is_over_the_ranks_that_there_are():
    assert any("over the 2 ranks" in each for each in saved(train(world_size=2)))


@pytest.mark.parametrize(
    ("mib", "phases", "where"),
    [
        (40, [Phase.BACKWARD], "over the 2 ranks of axis dp"),
        (40, [Phase.OTHER], "over the 2 ranks of axis dp"),
        (1, [Phase.BACKWARD], None),  # of norms alone: ranks hold other parts
        (40, [Phase.FORWARD, Phase.BACKWARD], None),  # activations
    ],
)
def test_sharding_is_over_the_ranks_that_add_gradients_up(mib, phases, where):
    recording = train(world_size=8)
    recording.groups["dp"] = (0, 4)
    sent = (TensorSpec((mib * MIB // 4,), (1,), "float32", "cuda", 1000),)
    fields = ("c10d.allreduce_", "dp", (0, 4), "dp", mib * MIB, "float32", sent, sent)
    for phase in phases:
        site = Site("", phase, 0, "")
        recording.events.append(Comm(0, "all_reduce", *fields, 0, 1, False, -1, site))
    found = [each for each in saved(recording) if each.startswith("shard")]
    assert [where in each for each in found] == ([True] if where else [])


def test_groups_over_the_same_ranks_should_be_one():
    recording = train(world_size=16)
    recording.groups.update({f"{i}": tuple(range(8)) for i in range(5)})
    account = count_memory(recording, gpu(nccl_communicator=50 * MIB))
    (found,) = [each for each in suggest(account) if "process group" in each.text]
    assert "instead of the 5 over ranks 0-7" in found.text
    assert found.saved_bytes == 200 * MIB


def test_what_is_done_already_is_not_suggested():
    recording = train()
    gathered = StorageInfo(1, Category.GATHERED_PARAMETER)
    recording.storages[1000] = gathered
    site = Site("Net.layers.0.mlp", Phase.RECOMPUTE, 0, "")
    recording.events.append(Alloc(1001, 1, 0, -1, site))
    found = saved(recording)
    assert not any(each.startswith(("shard", "checkpoint")) for each in found)


def test_gathered_parameters_that_wait_for_backward():
    script = Script(world_size=8)
    script.phase = Phase.FORWARD
    gathered = [
        script.alloc(50, Category.GATHERED_PARAMETER, f"Net.layers.{i}")
        for i in range(8)
    ]
    script.free(*gathered)
    found = saved(script.recording)
    assert found == {
        "give gathered parameters back after forward (reshard_after_forward=True)": 300
    }


def test_temporaries_of_the_optimizer():
    script = Script()
    script.alloc(20, Category.PARAMETER)
    script.phase = Phase.OPTIMIZER
    script.free(script.alloc(60))
    text = "fused=True in the optimizer: it needs no temporaries"
    assert saved(script.recording)[text] == 60
    script.recording.can_fuse = False  # as of RMSprop
    assert text not in saved(script.recording)


def test_fragments_that_expandable_segments_would_not_have():
    script = Script()
    holes = [script.alloc(30 + 2 * i) for i in range(6)]
    for hole in holes:
        script.free(hole)
    script.alloc(150)
    account = count_memory(script.recording, gpu())
    found = {each.text: each for each in suggest(account)}
    found = found["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]
    assert found.of == "reserved"
    assert found.saved_bytes == account.reserved_peak - 220 * MIB
    text = describe_memory(account, suggest(account))
    assert "expandable_segments:True (reserved; simulated with it)" in text


def test_a_change_that_only_uncovers_the_next_peak_gets_what_it_brings():
    script = Script()
    script.phase = Phase.FORWARD
    script.free(script.alloc(100, module="Net.layers.0", saved=True))
    script.phase = Phase.OPTIMIZER
    script.free(script.alloc(90))
    found = saved(script.recording)
    assert (
        found[next(each for each in found if each.startswith("half the batch"))] == 10
    )


# ----------------------------------------------------------------------------
# Text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (2**20, "1.00 MiB")]
)
def test_sizes(nbytes, text):
    assert size_text(nbytes) == text


def test_the_text_says_the_verdict_first_and_names_the_holders():
    account = count_memory(train(), gpu(context=4 * MIB))
    lines = describe_memory(account, suggest(account)).splitlines()
    assert lines[0] == (
        "Fits on NVIDIA H100 SXM 80GB: 650.00 MiB of 1.00 GiB are left at the worst time."
    )
    text = "\n".join(lines)
    assert "steady step      370.00 MiB  370.00 MiB <- peak" in text
    assert "between steps    120.00 MiB" in text
    assert "60.00 MiB  3 x activation of Net.layers.3, train.py:12 main" in text
    assert "120.00 MiB  half the batch of a rank" in text
    assert "4.00 MiB  CUDA context (test)" in text
