"""Predicted steps of hand-made recordings: what they are made of, told and suggested."""

import math
from functools import partial

import pytest

from torchspmd.predict.account import Part
from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.bounds import Bounds
from torchspmd.predict.clock import LiveClock
from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import load_gpu, load_network
from torchspmd.predict.host import HostModel
from torchspmd.predict.prediction import error_bar, predict_time
from torchspmd.predict.time_suggestions import suggest_faster
from torchspmd.predict.time_text import describe_time
from torchspmd.rehearse.recording import (
    Alloc,
    Category,
    Comm,
    EventRecord,
    Mark,
    MarkKind,
    Node,
    Op,
    Phase,
    Recording,
    Site,
    StorageInfo,
    Synchronize,
    TensorSpec,
    Wait,
)
from torchspmd.rehearse.world import EndOfWindow
from torchspmd.report.views.prediction import exposed_by_layers

H100, NETWORK = load_gpu("h100"), load_network("ib-ndr400")


def tensor(*shape, storage=0, dtype="bfloat16"):
    stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    return TensorSpec(shape, stride, dtype, "cuda", storage)


class Script:
    """Writes a recording down, as a rehearsal would."""

    def __init__(self, world_size=1, rank=0):
        self.recording = Recording(world_size, rank)
        self.events = self.recording.events
        self.step = 0
        self.number = 0

    def site(self, phase, module="net.layers.0.mlp"):
        return Site(module, phase, self.step, "")

    def op(self, name, inputs, outputs, phase=Phase.FORWARD, **more):
        self.number += 1
        site = self.site(phase, more.pop("module", "net.layers.0.mlp"))
        op = Op(self.number, name, inputs, outputs, (), 0, site)
        self.events.append(op._replace(**more))

    def product(self, size, phase=Phase.FORWARD, dtype="bfloat16", **more):
        x = tensor(size, size, dtype=dtype)
        self.op("aten.mm.default", (x, x), (x,), phase, **more)

    def comm(self, kind, nbytes, *, peer=-1, ranks=(0, 1), is_async=True):
        self.number += 1
        self.events.append(
            Comm(
                number=self.number,
                kind=kind,
                op="c10d.x",
                group="g",
                ranks=ranks,
                axis="dp",
                payload_bytes=nbytes,
                dtype="float32",
                inputs=(),
                outputs=(),
                stream=0,
                comm_stream=1,
                is_async=is_async,
                peer=peer,
                site=self.site(Phase.BACKWARD),
            )
        )
        return self.number

    def wait(self, number):
        self.events.append(Wait(number, 0, self.site(Phase.OPTIMIZER, "")))

    def begin(self):
        self.events.append(Mark(MarkKind.STEP_BEGIN, self.step))

    def end(self):
        self.events.append(Mark(MarkKind.STEP_END, self.step))
        self.step += 1
        self.recording.steps = self.step


def two_steps(body, **world):
    script = Script(**world)
    for _ in range(2):
        script.begin()
        body(script)
        script.end()
    return script.recording


def training(script):
    for _ in range(4):
        script.product(8192)
    for _ in range(8):
        script.product(8192, Phase.BACKWARD)
    handle = script.comm("all_reduce", 1 << 30)
    x = tensor(1 << 26, dtype="float32")
    script.wait(handle)
    script.op("aten._fused_adamw_.default", (x,) * 4, (), Phase.OPTIMIZER, module="")


def test_a_step_is_the_sum_of_its_parts_and_has_an_mfu():
    result = predict_time(two_steps(training, world_size=2), H100, NETWORK)
    account = result.account
    assert sum(account.parts.values()) == pytest.approx(result.step_seconds)
    assert result.flops() == 12 * 2 * 8192**3
    assert 0.4 < result.mfu < 0.85
    assert account.parts[Part.EXPOSED] > 0
    assert account.exposed[0].axis == "dp"
    assert 0 < account.optimizer < result.step_seconds
    assert not result.crosses_nodes


def test_only_the_last_step_counts():
    def body(script):
        if script.step == 0:
            script.product(16384)
        script.product(4096)

    result = predict_time(two_steps(body), H100)
    assert result.flops() == 2 * 4096**3


def test_kernels_of_different_kinds_do_not_follow_at_once():
    def body(script, **more):
        for _ in range(3):
            script.product(8192, **more)

    plain = predict_time(two_steps(body), H100)
    graph = predict_time(two_steps(lambda script: body(script, through="graph")), H100)
    gap = Figures(H100).number("kernels.gap")
    times = [
        sum(item.work for item in each.program.items if item.event)
        for each in (plain, graph)
    ]
    assert times[0] - times[1] == pytest.approx(3 * gap)


def test_one_step_stands_for_a_steady_one_and_that_is_noted():
    script = Script()
    script.begin()
    script.product(1024)
    script.end()
    result = predict_time(script.recording, H100)
    assert result.step_seconds > 0
    assert any("Only one step was rehearsed" in note for note in result.notes())


def test_without_a_step_there_is_no_time():
    script = Script()
    script.product(1024)
    result = predict_time(script.recording, H100)
    assert result.step_seconds is None
    assert result.as_json()["step_seconds"] is None
    assert result.as_json()["timeline"] is None
    assert "No step time" in describe_time(result)
    assert suggest_faster(result) == []


def test_recomputation_is_not_useful_work():
    def body(script):
        script.product(4096)
        script.product(4096, Phase.RECOMPUTE)
        script.product(4096, Phase.BACKWARD)

    result = predict_time(two_steps(body), H100)
    assert result.flops(recomputed=True) == 1.5 * result.flops()
    gains = suggest_faster(result)
    assert any("checkpoint less" in gain.text for gain in gains)


def test_a_host_bound_script_is_told_so_with_the_remedy():
    def body(script):
        for _ in range(50):
            script.product(64)

    result = predict_time(two_steps(body), H100)
    assert result.is_host_bound
    text = describe_time(result, suggest_faster(result))
    assert "HOST-BOUND" in text
    assert "CUDA graphs" in text


def test_a_script_that_reads_values_is_told_to_do_so_less_often():
    def body(script):
        for _ in range(2):
            script.product(2048)
        script.recording.events.append(Synchronize(0, None, "aten._local_scalar_dense"))

    recording = two_steps(body)
    result = predict_time(recording, H100)
    assert result.is_host_bound
    assert "HOST-BOUND: the host waits for the device" in describe_time(result, [])
    (gain,) = [each for each in suggest_faster(result) if "read a value" in each.text]
    waits = [e for e in recording.events if isinstance(e, Synchronize)]
    for wait in waits:
        recording.events.remove(wait)
    without = predict_time(recording, H100).step_seconds
    assert gain.seconds == pytest.approx(result.step_seconds - without, rel=0.05)


def wrapped(kind, phase, category, dtype="float32", axis="dp", size=1 << 26):
    """A step whose wrapper sends something large that is waited for at once."""

    def body(script):
        script.product(4096)
        script.recording.storages[77] = StorageInfo(4 * size, category)
        script.number += 1
        sent = (tensor(size, storage=77, dtype=dtype),)
        nbytes = size * (4 if dtype == "float32" else 2)
        script.events.append(
            Comm(
                script.number,
                kind,
                f"c10d.{kind}",
                axis,
                tuple(range(8)),
                axis,
                nbytes,
                dtype,
                sent,
                sent,
                0,
                5,
                False,
                -1,
                script.site(phase),
            )
        )

    return predict_time(two_steps(body), H100)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("reduce_scatter", "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)"),
        ("all_reduce", "register_comm_hook(None, bf16_compress_hook)"),
    ],
)
def test_gradients_that_are_reduced_in_32_bits_get_the_remedy(kind, remedy):
    result = wrapped(kind, Phase.BACKWARD, Category.COMMUNICATION)
    gain = suggest_faster(result)[0]
    assert gain.text.startswith(f"reduce gradients in bfloat16: {remedy}; sums")
    half = wrapped(kind, Phase.BACKWARD, Category.COMMUNICATION, "bfloat16")
    saved = result.step_seconds - half.step_seconds
    assert gain.seconds == pytest.approx(saved, rel=0.02)
    assert not any("reduce gradients" in each.text for each in suggest_faster(half))


def test_parameters_that_are_gathered_again_get_the_remedy():
    result = wrapped("all_gather", Phase.BACKWARD, Category.COMMUNICATION)
    gain = suggest_faster(result)[0]
    assert "reshard_after_forward=False" in gain.text
    assert "256 MiB" in gain.text
    full = suggest_faster(result, room=200 << 20)
    assert not any("reshard_after_forward" in each.text for each in full)
    # What could be gained at most is not told beside what gains it.
    assert not any("the most" in each.how for each in suggest_faster(result))
    forward = wrapped("all_gather", Phase.FORWARD, Category.COMMUNICATION)
    (gain,) = suggest_faster(forward)
    assert "overlap or shrink the communication of axis dp" in gain.text


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_activations_of_layers_are_no_gradients_of_a_wrapper(kind):
    result = wrapped(kind, Phase.BACKWARD, Category.TEMPORARY, axis="tp")
    (gain,) = suggest_faster(result)
    assert "overlap or shrink the communication of axis tp" in gain.text


def test_fp32_products_get_the_remedy():
    result = predict_time(two_steps(lambda s: s.product(8192, dtype="float32")), H100)
    gain = suggest_faster(result)[0]
    assert "autocast" in gain.text
    assert "TF32" in gain.text
    assert gain.seconds > 0.5 * result.step_seconds


def test_products_in_tf32_have_its_peak_and_are_not_told_to_use_it():
    def body(script):
        script.product(8192, dtype="float32", scalars=(("allow_tf32", True),))

    result = predict_time(two_steps(body), H100)
    assert result.peak_rate[0] == "tf32"
    assert 0.3 < result.mfu < 1.0
    assert not [gain for gain in suggest_faster(result) if "TF32" in gain.text]


def test_a_file_without_a_power_limit_is_told():
    def body(script):
        x = tensor(1 << 20)
        script.op("aten.add.Tensor", (x, x), (x,))

    left = {k: v for k, v in H100.figures.items() if not k.startswith("power.")}
    own = type(H100)("own", "Own", "9.0", left)
    text = "The GPU's file has no power limit and sustained rate (power.limit, "
    for gpu, is_told in ((own, True), (H100, False)):
        notes = predict_time(two_steps(body), gpu).notes()
        assert any(text in note for note in notes) == is_told


def _told_as_unlike(recording):
    notes = predict_time(recording, H100).notes()
    return [note for note in notes if note.startswith("The steps that were rehearsed")]


def test_a_step_that_is_not_like_those_before_it_is_a_note():
    script = Script()
    for products in (3, 1):  # as a rollout before the first of two updates
        script.begin()
        for _ in range(products):
            script.product(8192)
        script.end()
    [note] = _told_as_unlike(script.recording)
    assert "products of 3.3 TFLOP before the step that is told, which has 1.1." in note


def test_optimizers_that_take_turns_make_steps_that_are_alike():
    script = Script()
    for products in (1, 2, 3):  # of the critic, the actor, and both
        script.begin()
        for _ in range(products):
            script.product(8192)
        script.end()
    script.recording.parts = 1
    assert _told_as_unlike(script.recording) == []
    assert _told_as_unlike(two_steps(training)) == []


@pytest.mark.parametrize(
    ("world_size", "kind", "is_told"),
    [(8, "", True), (8, "barrier", True), (8, "all_reduce", False), (1, "", False)],
)
def test_ranks_that_send_each_other_nothing_are_a_note(world_size, kind, is_told):
    def body(script):
        script.product(1024)
        if kind:
            script.comm(kind, 0 if kind == "barrier" else 4)

    notes = predict_time(two_steps(body, world_size=world_size), H100).notes()
    assert any("send each other nothing" in note for note in notes) == is_told


def test_unknown_operators_are_listed():
    def body(script):
        x = tensor(1 << 20)
        script.op("mylib.surprise.default", (x,), (x,))

    notes = predict_time(two_steps(body), H100).notes()
    assert any("mylib.surprise.default (1)" in note for note in notes)


@pytest.mark.parametrize("name", ["mm", "silu", "scaled_attention", "convolution"])
def test_what_other_libraries_call_like_torch_is_not_taken_for_it(name):
    """Such as a product that transposes its second matrix; no compiler fuses it."""

    def body(script, region):
        left, right = tensor(8192, 1024), tensor(4096, 1024, storage=2)
        script.op("aten.relu.default", (left,), (left,), region=region)
        result = tensor(8192, 4096, storage=3)
        script.op(f"mylib.{name}.default", (left, right), (result,), region=region)
        script.op("aten.relu.default", (result,), (result,), region=region)

    for region in (None, 1):
        prediction = predict_time(two_steps(partial(body, region=region)), H100)
        [note] = [note for note in prediction.notes() if f"mylib.{name}" in note]
        assert note.startswith(
            "Operators on sparse tensors, or of other libraries, are priced"
        )
        assert not prediction.model_flops


def test_operators_of_a_compiled_region_are_one_kernel():
    def body(script, region):
        for at in range(10):
            inputs = (tensor(1 << 28, storage=at),)
            outputs = (tensor(1 << 28, storage=at + 1),)
            script.op("aten.relu.default", inputs, outputs, region=region)
        last = tensor(1 << 28, storage=10)
        script.op("aten.sum.default", (last,), (tensor(1, storage=99),))

    eager, compiled = (
        predict_time(two_steps(lambda s, r=region: body(s, r)), H100)
        for region in (None, 1)
    )
    assert compiled.step_seconds < 0.3 * eager.step_seconds
    assert any("torch.compile" in gain.text for gain in suggest_faster(eager))


def kernels_of(body):
    program = predict_time(two_steps(body), H100).program
    return [cost.kernels for _, cost in sorted(program.costs.items())]


def test_what_has_nothing_in_common_is_in_kernels_of_its_own():
    """Casts of weights stand between the layers of a compiled model."""

    def body(script):
        x, y, z = (tensor(1 << 20, storage=at) for at in (1, 2, 3))
        script.op("aten.relu.default", (x,), (y,), region=1)
        for at in (10, 20):
            weight, low = tensor(512, storage=at), tensor(512, storage=at + 1)
            script.op("aten._to_copy.default", (weight,), (low,), region=1)
        script.op("aten.gelu.default", (y,), (z,), region=1)

    assert kernels_of(body) == [1, 1, 1]


def test_sums_over_rows_of_a_compiled_region_are_made_of_parts():
    def body(script, phase=Phase.BACKWARD):
        x, y = tensor(4096, 512, storage=1), tensor(4096, 512, storage=2)
        rows, weights = tensor(512, storage=3), tensor(512, storage=4)
        script.op("aten.mul.Tensor", (x, x), (y,), phase, region=1)
        script.op("aten.sum.dim_IntList", (y,), (rows,), phase, region=1)
        script.product(64, phase, region=1)
        script.op("aten.sum.dim_IntList", (x,), (weights,), phase, region=1)

    assert kernels_of(body) == [3, 1, 2]


def test_a_checkpoint_in_a_compiled_region_is_computed_again_in_its_backward():
    def body(script, region):
        for phase in (Phase.FORWARD, *[Phase.RECOMPUTE, Phase.BACKWARD] * 4):
            is_compiled = phase is not Phase.RECOMPUTE
            number = region if is_compiled else None  # not known to the recorder
            script.product(64, phase, region=number)

    compiled, eager = (
        predict_time(two_steps(lambda s, r=r: body(s, r)), H100).host_issue_seconds
        for r in (1, None)
    )
    figures = Figures(load_gpu("h100"))
    assert eager > 4 * figures.number("launch.checkpoint")
    regions = [f"launch.compiled_{way}_region" for way in ("forward", "backward")]
    assert compiled < 1.5 * sum(map(figures.number, regions)) + 9 * 5e-5


def test_the_timeline_has_columns_of_one_length_inside_the_step():
    result = predict_time(two_steps(training, world_size=2), H100, NETWORK)
    timeline = result.as_json()["timeline"]
    columns = [
        key for key, value in timeline.items()
        if isinstance(value, list) and key not in ("lanes", "strings", "phases")
    ]  # fmt: skip
    lengths = {len(timeline[key]) for key in columns}
    assert len(lengths) == 1
    assert len(columns) == 11
    kinds = [lane["kind"] for lane in timeline["lanes"]]
    assert kinds[0] == "host"
    assert {"compute", "communicator"} <= set(kinds)
    assert max(timeline["name"]) < len(timeline["strings"])
    exposed = [at for at, kind in enumerate(timeline["exposed"]) if kind == 1]
    assert exposed
    for at in exposed:
        target = timeline["waits_for"][at]
        name = timeline["strings"][timeline["name"][target]]
        assert name == "all_reduce dp"
    seconds = result.step_seconds * 1e6
    ends = [
        start + duration
        for start, duration, lane in zip(
            timeline["start"], timeline["duration"], timeline["lane"], strict=True
        )
        if lane
    ]
    assert max(ends) <= seconds * 1.001
    assert [phase["name"] for phase in timeline["phases"]] == [
        "forward",
        "backward",
        "optimizer",
    ]


def test_two_stages_of_a_pipeline_are_joined():
    def stage(first):
        def body(script):
            peer = 1 if first else 0
            for _ in range(4):
                if first:
                    script.product(4096)
                    script.comm("send", 1 << 20, peer=peer, is_async=False)
                else:
                    script.comm("recv", 1 << 20, peer=peer, is_async=False)
                    script.product(4096)
            for _ in range(4):
                if not first:
                    script.product(4096, Phase.BACKWARD)
                    script.comm("send", 1 << 20, peer=peer, is_async=False)
                else:
                    script.comm("recv", 1 << 20, peer=peer, is_async=False)
                    script.product(4096, Phase.BACKWARD)

        return two_steps(body, world_size=2, rank=0 if first else 1)

    stages = [stage(True), stage(False)]
    both = [predict_time(stages, H100, of=place) for place in (0, 1)]
    product = both[0].account.parts[Part.COMPUTE] / 8
    for result in both:
        assert result.account.parts[Part.BUBBLE] > 0.8 * product
        assert result.step_seconds > 9 * product
        assert [each.rank for each in result.stages] == [0, 1]
        assert "The stages are uneven" not in describe_time(result)


def test_of_uneven_stages_the_slowest_is_named_and_the_mean_is_told():
    def stage(first):
        def body(script):
            peer = 1 if first else 0
            script.comm("send" if first else "recv", 1 << 20, peer=peer, is_async=False)
            for _ in range(1 if first else 3):
                script.product(4096)

        return two_steps(body, world_size=2, rank=0 if first else 1)

    result = predict_time([stage(True), stage(False)], H100)
    light, heavy = result.stages
    assert light.flops == result.flops()
    assert heavy.flops == 3 * light.flops
    assert result.model_flops == 2 * light.flops
    assert light.compute_seconds == pytest.approx(result.account.parts[Part.COMPUTE])
    assert heavy.compute_seconds == pytest.approx(3 * light.compute_seconds, rel=0.02)
    text = describe_time(result)
    assert "a rank, the mean of 2 stages" in text
    assert "The stages are uneven: rank 1 computes for" in text


def test_why_a_pipeline_has_no_time():
    stages = [two_steps(training, world_size=2), Recording(2, 1)]
    text = describe_time(predict_time(stages, H100, NETWORK))
    assert text == "No step time: another rank of the pipeline made no optimizer step."


def test_predictions_are_equal_on_every_run():
    recording = two_steps(training, world_size=2)
    one, other = (predict_time(recording, H100, NETWORK).as_json() for _ in range(2))
    assert one == other


def test_the_error_and_the_assumptions_say_where_they_come_from():
    data = predict_time(two_steps(training, world_size=2), H100, NETWORK).as_json()
    assert 0 < data["step_error"] < 1
    assert data["step_error_source"]
    assert {"what", "value", "source", "error"} == set(data["assumptions"][0])
    assert "taken from" in next(
        each["source"]
        for each in data["assumptions"]
        if each["what"].startswith("host_")
    )


def test_gradients_are_handed_over_behind_a_compiled_backward():
    """They cost the host, and part no kernel in two."""

    def predicted(gradients):
        script = Script()
        for _ in range(2):
            script.begin()
            script.product(8, region=0)
            x, phase = tensor(8), Phase.BACKWARD
            for _ in range(4):
                script.op("aten.mul.Tensor", (x,), (x,), phase)
                if gradients:
                    of = {"views": True, "node": Node.GRADIENT}
                    script.op("aten.detach.default", (x,), (x,), phase, **of)
            script.end()
        return predict_time(script.recording, H100)

    with_them, without = predicted(True), predicted(False)
    kernels = [len(each.program.costs) for each in (with_them, without)]
    assert kernels[0] - kernels[1] == 4  # the views themselves
    more = with_them.host_issue_seconds - without.host_issue_seconds
    figures = Figures(H100)
    each = figures.number("host_optimizer.accumulate")
    assert more == pytest.approx(4 * each * figures.number("host_mixed.forward"))


def test_the_clock_of_a_script_tells_predicted_time():
    script = Script()
    clock = LiveClock(script.recording, H100, None)
    assert clock.now() == 0
    script.events.append(EventRecord(0, 0))
    script.product(8192)
    script.product(8192)
    script.events.append(EventRecord(1, 0))
    issued = clock.now()
    assert 0 < issued < 1e-3  # the host only issues
    both = clock.elapsed(0, 1)
    assert 2 < both < 6  # milliseconds
    script.events.append(Synchronize(None, None, "torch.cuda.synchronize"))
    waited = clock.now()
    assert waited >= both / 1e3
    script.product(8192)
    script.events.append(Synchronize(None, None, "torch.cuda.synchronize"))
    assert clock.now() - waited == pytest.approx(both / 2e3, rel=0.1)
    assert clock.elapsed(0, 99) == 0


def test_only_fully_shard_pays_for_its_hooks():
    script = Script(world_size=2)
    x = tensor(8)
    for name in ("fsdp.all_gather_copy_in.default", "aten.add.Tensor"):
        script.op(name, (x,), (x,), Phase.BACKWARD)
        script.comm("all_gather", 64)
    figures = Figures(H100)
    host = HostModel(figures)
    _, sharded, _, plain = map(host.seconds, script.events)
    hooks = figures.number("launch.fully_shard_forward")
    assert sharded - plain == pytest.approx(hooks)


def test_a_candidate_that_cannot_be_the_best_is_told_after_its_first_step():
    script = Script()
    script.begin()
    for _ in range(4):
        script.product(8192)
    script.product(8192, Phase.OPTIMIZER)  # only in the first step
    script.end()
    kernels = 4 * 2 * 8192**3 / H100.number("flops.bfloat16_achieved")

    def why(**known):
        bounds = Bounds(H100, AllocatorSettings(), **known)
        return bounds.why_slower(script.recording)

    assert not why()
    assert not why(seconds=1.2 * kernels)
    assert not why(flops_rate=1e14)
    text = why(seconds=0.5 * kernels)
    assert text.startswith("left out: its kernels alone take 5.")
    assert "the best so far does as much work in 2.77 ms" in text
    assert why(flops_rate=1e15).startswith("left out")


def test_what_does_not_fit_by_the_first_step_is_told():
    recording = Script().recording
    bounds = Bounds(H100, AllocatorSettings())
    bounds.look(recording)  # nothing is known yet: it goes on
    recording.storages[1] = StorageInfo(200 << 30)
    site = Site("net", Phase.FORWARD, 0, "")
    recording.events.append(Alloc(1, 200 << 30, 0, 0, site))
    bounds.look(recording)
    bounds = Bounds(H100, AllocatorSettings(), flops_rate=1e20)
    with pytest.raises(EndOfWindow):
        bounds.look(recording)
    assert bounds.is_reached


def test_the_error_to_expect_is_larger_where_the_host_is_near():
    gpu = load_gpu("h200")
    alone, near = error_bar(gpu), error_bar(gpu, near_host=True)
    assert alone.error < error_bar(gpu, multi_rank=True).error < near.error
    assert error_bar(gpu, multi_rank=True, near_host=True) == near
    assert "calibrate" in near.source


def test_waits_of_like_layers_are_one_row_whatever_each_of_them_took():
    def wait(layer, cause, seconds=1.0):
        return {
            "axis": "dp",
            "kind": "all_gather",
            "module": f"GPT.layers.{layer}",
            "seconds": seconds,
            "bytes": 8,
            "count": 1,
            "cause": cause,
        }

    behind = "queued behind reduce_scatter of GPT.layers.{} on the same communicator"
    rows = exposed_by_layers(
        [
            wait(0, behind.format(1)),
            wait(1, behind.format(2)),
            wait(
                2, "longer (3.00 ms) than the computation that it overlaps with (1 ms)"
            ),
            wait(5, behind.format(6)),
        ]
    )
    assert [(row["module"], row["count"], row["cause"]) for row in rows] == [
        ("GPT.layers.[0-1,5]", 3, behind.format("*")),
        (
            "GPT.layers.2",
            1,
            "longer (3.00 ms) than the computation that it overlaps with (1 ms)",
        ),
    ]
