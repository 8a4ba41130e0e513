"""The clock that a power limit leaves, against hand-made steps."""

import pytest

from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import load_gpu
from torchspmd.predict.operators import Cost
from torchspmd.predict.power import Power, at_clock, power_of
from torchspmd.predict.repeated import extend
from torchspmd.predict.timeline import Item, Kind

PRODUCT = Cost(1.0, 0, 8e14, "matmul", busy=1.0)
H200 = Figures(load_gpu("h200"))


def clock(costs, seconds, ranks=1):
    return power_of(H200, costs, seconds, ranks).clock


def test_products_alone_run_at_the_sustained_rate():
    gpu = load_gpu("h200")
    sustained = gpu.number("flops.bfloat16_sustained")
    expected = sustained / gpu.number("flops.bfloat16_achieved")
    assert clock([PRODUCT], 1.0) == pytest.approx(expected, rel=1e-4)


def test_waiting_and_moving_bytes_leave_more_of_the_clock():
    copy = Cost(0.5, int(0.5 * 0.87 * 4.8e12), 0.0, "memory")
    alone, with_copy = clock([PRODUCT], 1.0), clock([PRODUCT, copy], 1.5)
    assert alone < with_copy < 1
    assert clock([PRODUCT], 3.0) == 1  # the device waits two thirds of the step
    assert clock([copy], 0.5) == 1


def test_what_was_measured_on_an_h200_comes_out():
    copy = Cost(0.51e-3, 2**31, 0.0, "memory")
    product = PRODUCT._replace(seconds=1.40e-3, busy=1.40e-3)
    for copies, measured in ((0, 0.835), (1, 0.862), (3, 0.893)):
        costs = [product] + copies * [copy]
        seconds = sum(cost.seconds for cost in costs)
        assert clock(costs, seconds) == pytest.approx(measured, abs=0.02)


def test_the_slowest_of_many_ranks_is_waited_for():
    powers = [power_of(H200, [PRODUCT], 1.0, ranks) for ranks in (1, 8, 512)]
    slowest = [power.slowest for power in powers]
    assert slowest[0] == powers[0].clock
    assert slowest[0] > slowest[1] > slowest[2] > 0.9 * slowest[0]
    idle = power_of(H200, [PRODUCT], 9.0, 512)
    assert idle.slowest == 1  # nobody is at the limit


def test_only_kernels_of_tensor_cores_are_slowed():
    item = Item(0.0, None, 2.0, Kind.COMPUTE)
    assert at_clock(item, PRODUCT, 0.5).work == 4.0
    assert at_clock(item, Cost(2.0, 8, 0.0, "memory"), 0.5).work == 2.0
    assert at_clock(item, None, 0.5).work == 2.0


def test_a_lower_limit_of_a_file_leaves_less_of_the_clock(tmp_path):
    """The sustained rate is that at the limit of the file that it was measured for."""
    path = tmp_path / "capped.toml"
    path.write_text('like = "h200"\n[power]\nlimit = { value = 500, source = "me" }\n')
    capped = power_of(Figures(load_gpu(str(path))), [PRODUCT], 1.0, 1)
    watts = (500 - capped.idle) / (700 - capped.idle)
    expected = clock([PRODUCT], 1.0) * watts ** (1 / capped.exponent)
    assert capped.clock == pytest.approx(expected, rel=1e-3)


def test_a_file_without_a_sustained_rate_keeps_its_clock():
    gpu = load_gpu("h200")
    left = {k: v for k, v in gpu.figures.items() if not k.startswith("power.")}
    own = type(gpu)("own", "Own", "9.0", left)
    assert power_of(Figures(own), [PRODUCT], 1.0, 8) == Power()
    assert Power().slowest == 1


def prediction(blocks):
    """A step of a head that moves bytes, and of blocks that only multiply."""
    costs = [Cost(1.0, int(3e12), 0.0, "memory"), *(blocks * [PRODUCT])]
    power = power_of(H200, costs, 1.0 + blocks, 1)
    seconds = power.seconds + power.lost
    return {
        "step_seconds": seconds,
        "compute_seconds": seconds,
        "model_flops": 8e14 * blocks,
        "mfu": 8e14 * blocks / seconds / 989e12,
        "power": {**power._asdict(), "clock": power.clock},
        "fits": "yes",
        "notes": [str(blocks)],
        "memory": {
            "reserved_peak_bytes": 10 + 5 * blocks,
            "device_peak_bytes": 20 + 5 * blocks,
            "device_bytes": 100,
            "margin_bytes": 80 - 5 * blocks,
        },
    }


def test_few_blocks_are_extended_to_many():
    whole = prediction(12)
    extended = extend(prediction(2), prediction(4), (2, 4), 12)
    for key in ("step_seconds", "compute_seconds", "model_flops", "mfu"):
        assert extended[key] == pytest.approx(whole[key], rel=1e-6), key
    assert extended["power"]["clock"] == pytest.approx(whole["power"]["clock"])
    assert extended["memory"] == whole["memory"]
    assert extended["fits"] == "yes"
    assert extended["notes"] == ["4"]


def test_blocks_that_do_not_fit_are_told():
    assert extend(prediction(2), prediction(4), (2, 4), 15)["fits"] == "yes"
    assert extend(prediction(2), prediction(4), (2, 4), 16)["fits"] == "at risk"
    too_large = extend(prediction(2), prediction(4), (2, 4), 17)
    assert (too_large["fits"], too_large["memory"]["margin_bytes"]) == ("no", -5)
