"""Measuring a device: every section runs, failures are told, and the file is read back."""

import itertools
import warnings
from dataclasses import replace

import pytest
import torch

from torchspmd._cli import main
from torchspmd.predict.calibration import (
    Calibration,
    Limits,
    calibrate,
    collectives,
    host_in_proportion,
    run,
    with_other_cases,
)
from torchspmd.predict.calibration.meter import Meter
from torchspmd.predict.collectives import collective_seconds, place
from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import (
    Figure,
    Hardware,
    hardware_text,
    known_gpu,
    load_gpu,
)
from torchspmd.rehearse.nodes import Nodes


@pytest.fixture(scope="module")
def measured():
    sections = [each for each in run._SECTIONS if each[0] != "compiled regions"]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(run, "_SECTIONS", sections)
        yield calibrate(
            torch.device("cpu"), seconds=60, limits=Limits(1.4e8, 1e6, calls=1)
        )


def test_every_section_has_figures(measured):
    tables = {key.partition(".")[0] for key in measured.figures}
    assert tables >= {
        "copies",
        "flops",
        "host_backward",
        "host_forward",
        "host_optimizer",
        "launch",
        "matmul",
        "operators",
    }
    assert measured.figures["host_mixed.forward"].value >= 1
    assert "host_optimizer.accumulate" in measured.figures
    assert all("measured on cpu" in f.source for f in measured.figures.values())
    # the one operator that CPUs have not
    assert all("_fused_rms_norm_backward" in note for note in measured.notes)


def test_rows_are_bytes_or_shapes_and_seconds(measured):
    nbytes, seconds = measured.figures["operators.elementwise_2"].value[0]
    assert nbytes == 3 * 2 * 8192
    assert 0 < seconds < 1
    layout, batch, m, n, k, seconds = measured.figures["matmul.bfloat16"].value[0]
    assert (layout, batch) == (0, 1)
    assert 2 * m * n * k < 1.4e8


def test_a_case_that_fails_is_noted_and_leaves_the_others(monkeypatch):
    def cases(meter, limits):
        def bad(label):
            raise RuntimeError("no such kernel\nmore")
            yield

        def good(label):
            yield "launch.kernel", 1e-6

        yield from (lambda: bad("b"), lambda: good("g"))

    monkeypatch.setattr(run, "_SECTIONS", [("kernels", cases)])
    monkeypatch.setattr(run, "_GRIDS", [])
    result = calibrate(torch.device("cpu"), seconds=1)
    assert result.figures["launch.kernel"].value == 1e-6
    assert result.notes == ["kernels, 1 not measured: : RuntimeError: no such kernel"]


def test_a_grid_stops_when_its_time_is_up(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(run.time, "perf_counter", lambda: float(next(clock)))

    def cases(meter, limits):
        for size in range(20):
            yield lambda size=size: iter([("matmul.float32", (size, 1.0))])

    monkeypatch.setattr(run, "_HOST", [])
    monkeypatch.setattr(run, "_SECTIONS", [])
    monkeypatch.setattr(run, "_GRIDS", [("products", 1.0, cases)])
    result = calibrate(torch.device("cpu"), seconds=9)
    assert 0 < result.cases < 20
    assert result.notes == [
        f"products: {20 - result.cases} cases left out, their time was up"
    ]


def test_figures_of_the_host_are_those_that_are_known_times_one_factor():
    known = {f"host_forward.{name}": Figure(2e-6, "known") for name in range(30)}
    known |= {
        "host_mixed.forward": Figure(1.6, "known"),
        "launch.kernel": Figure(1e-6, "known"),
    }
    measured = {
        key: Figure(figure.value * (1.5 + 0.1 * (place % 3 - 1)), "measured")
        for place, (key, figure) in enumerate(known.items())
    }
    measured["host_forward.new"] = Figure(7e-6, "measured")
    figures, factor = host_in_proportion(measured, known)
    assert factor == pytest.approx(1.5)
    assert figures.keys() == measured.keys()
    del measured["host_forward.0"]  # not measured: as much slower as the others
    figures, factor = host_in_proportion(measured, known)
    assert figures["host_forward.0"] == (
        pytest.approx(3e-6),
        "1.500 times 2e-06, known",
    )
    assert figures["host_mixed.forward"] == known["host_mixed.forward"]
    for key in ("launch.kernel", "host_forward.new"):  # of the device; of no known host
        assert figures[key] == measured[key]
    few = dict(list(measured.items())[:10])
    assert host_in_proportion(few, known) == (few, None)


def test_figures_of_the_host_are_the_middle_of_several_rounds(monkeypatch):
    drifting = iter((1e-6, 9e-6, 2e-6))

    def host(meter, limits):
        yield lambda: iter([("host_forward.add", next(drifting))])

    monkeypatch.setattr(run, "_HOST", [("host", host)])
    monkeypatch.setattr(run, "_SECTIONS", [("host", host)])
    grid = ("nothing", 1.0, lambda meter, limits: iter(()))
    monkeypatch.setattr(run, "_GRIDS", [grid, grid])
    result = calibrate(torch.device("cpu"), seconds=1)
    assert result.figures["host_forward.add"].value == 2e-6
    rounds = [each["host_forward.add"].value for each in result.rounds]
    assert rounds == [1e-6, 9e-6, 2e-6]


def test_cases_that_were_left_out_are_those_of_the_same_gpu():
    now = Figure(((1.0, 2.0, 0.5), (2.0, 2.0, 0.6)), "measured now")
    before = Figure(((1.0, 2.0, 0.9), (4.0, 2.0, 0.7)), "measured before")
    both = with_other_cases(now, before)
    assert both.value == ((1.0, 2.0, 0.5), (2.0, 2.0, 0.6), (4.0, 2.0, 0.7))
    assert both.source == "measured now; 1 cases: measured before"
    assert with_other_cases(now, None) is now
    number = Figure(1e-6, "measured now")
    assert with_other_cases(number, Figure(2e-6, "before")) is number


def test_random_values_and_times_of_the_host():
    meter = Meter(torch.device("cpu"))
    assert meter.random(3, 4).shape == (3, 4)
    assert meter.host_seconds(lambda: None, 10) < 1


def test_a_written_file_is_the_same_when_read(tmp_path):
    h100 = load_gpu("h100")
    more = {
        "matmul.bfloat16": Figure(((0.0, 1.0, 5.25e-05), (1.0, 2.0, 3.0)), 'a "b" \\ c')
    }
    gpu = Hardware("mine", "My GPU", "9.0", {**h100.figures, **more})
    path = tmp_path / "mine.toml"
    path.write_text(hardware_text(gpu))
    assert load_gpu(str(path)) == gpu
    assert gpu.rows("matmul.bfloat16")[0][2] == 5.25e-05
    assert gpu.rows("matmul.int4") == ()


@pytest.mark.parametrize(
    ("title", "name", "is_same"),
    [
        ("NVIDIA H200", "h200", True),
        ("NVIDIA A100-SXM4-80GB", "a100", True),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", True),
        ("NVIDIA L4", "h100", False),
    ],
)
def test_a_gpu_is_known_by_what_cuda_calls_it(title, name, is_same):
    gpu, same = known_gpu(title)
    assert (gpu.name, same) == (name, is_same)


def test_without_a_gpu_the_command_says_what_to_do(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["calibrate", "--out", str(tmp_path / "x.toml")]) == 2
    text = capsys.readouterr().err
    assert "there is no CUDA device here: run this on a machine with the GPU" in text


@pytest.mark.parametrize(
    ("title", "said"),
    (
        ("NVIDIA H200", "The host takes 2.00 times as long as that of h200."),
        (
            "NVIDIA H200",
            "  Its speed changed meanwhile: 2.60, 2.00 times in 2 rounds. Others use the "
            "machine, or it\n  has just started.",
        ),
        ("NVIDIA Z1", "Too few times of the host are known of this GPU: each is as"),
    ),
)
def test_how_fast_the_host_is_is_said(capsys, monkeypatch, tmp_path, title, said):
    slow = {
        key: figure._replace(value=2 * figure.value)
        for key, figure in load_gpu("h200").figures.items()
        if key.startswith("host_forward.")
    }
    command = "torchspmd._cli.calibrate.calibrate"
    first = {
        key: figure._replace(value=1.3 * figure.value) for key, figure in slow.items()
    }
    measured = Calibration(slow, rounds=[first, slow] if "changed" in said else [slow])
    monkeypatch.setattr(command, lambda *_, **__: measured)
    answers = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_name": title,
        "get_device_capability": (9, 0),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    assert main(["calibrate", "--out", str(tmp_path / "x.toml")]) == 0
    text = capsys.readouterr().out
    assert said in text
    assert ("changed" in text) == ("changed" in said)


def test_all_that_is_wrong_with_the_options_is_said_at_once(capsys, tmp_path):
    out = str(tmp_path / "x.txt")
    assert main(["calibrate", "--out", out, "--seconds", "0", "--gpu", "h100"]) == 2
    text = capsys.readouterr().err
    assert "--out must end in .toml, not x.txt" in text
    assert "--seconds must be more than 0" in text
    assert "give --nccl-tests" in text


def test_collectives_between_the_devices_of_a_machine(tmp_path):
    result, limits = Calibration(), Limits(nbytes=1 << 17)
    device = torch.device("cpu")
    tables = run._collectives(device, 2, limits, result, "measured here")
    assert result.notes == []
    kinds = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
    assert sorted(tables) == [f"collectives.{kind}_1x2" for kind in kinds]
    assert result.cases == 3 * len(kinds)
    path = tmp_path / "mine.toml"
    base = load_gpu("h100")
    path.write_text(hardware_text(replace(base, figures={**base.figures, **tables})))
    figures = Figures(load_gpu(str(path)))
    for kind in kinds:
        sizes, seconds = zip(*tables[f"collectives.{kind}_1x2"].value, strict=True)
        assert sizes == (1 << 13, 1 << 15, 1 << 17)
        told = collective_seconds(kind, 1 << 15, place((0, 1), Nodes(8)), figures)
        assert told == pytest.approx(seconds[1], rel=1e-3)


def fails(*arguments):
    raise ValueError("no luck")


def test_collectives_that_fail_are_told_and_leave_the_others(monkeypatch):
    monkeypatch.setattr(collectives, "_time_kind", fails)
    monkeypatch.setattr(collectives, "_CALLS", {"all_reduce": None})
    result = Calibration()
    device = torch.device("cpu")
    assert run._collectives(device, 2, Limits(nbytes=1 << 13), result, "here") == {}
    (note,) = result.notes
    assert note == "collectives.all_reduce_1x2, not measured: ValueError: no luck"


NCCL_TESTS = """\
# nccl-tests version 2.16.4 nccl-headers=22706 nccl-library=22706
# Collective test starting: all_gather_perf
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 8589934592 step: 2(factor)
# Using devices
#  Rank  0 Group  0 Pid  11 on     node1 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  12 on     node1 device  1 [0000:43:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  11 on     node2 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  12 on     node2 device  1 [0000:43:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place
#       size         count      type   redop    root     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
     1048576         65536     float    none      -1    50.00   20.97   15.73      0
  1073741824      67108864     float    none      -1  10000.0  107.37   80.53      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 48.13
"""


def test_collectives_are_read_from_nccl_tests(tmp_path, capsys):
    output, out = tmp_path / "log.txt", tmp_path / "mine.toml"
    output.write_text(NCCL_TESTS)
    words = ["calibrate", "--gpu", "h100", "--nccl-tests", str(output)]
    assert main([*words, "--out", str(out)]) == 0
    assert "with collectives.all_gather_2x2, written to" in capsys.readouterr().out
    figures = Figures(load_gpu(str(out)))  # no network is asked for
    where = place((0, 1, 8, 9), Nodes(8))

    def seconds(nbytes):
        return collective_seconds("all_gather", nbytes, where, figures)

    assert seconds(1 << 30) == pytest.approx(0.01)
    assert seconds(1 << 10) == pytest.approx(50e-6)  # latency
    assert seconds(1 << 32) == pytest.approx(0.04)  # the rate of the largest
    assert 50e-6 < seconds(1 << 25) < 0.01


def test_an_output_that_is_none_is_refused_with_every_problem(tmp_path, capsys):
    output = tmp_path / "log.txt"
    output.write_text("hello")
    words = ["calibrate", "--gpu", "h100", "--out", str(tmp_path / "x.toml")]
    assert main([*words, "--nccl-tests", str(output)]) == 2
    text = capsys.readouterr().err
    assert "say which test it was: rename it" in text
    assert "keep the lines that begin with #" in text
    assert "no lines of sizes and times" in text
    output.write_text(NCCL_TESTS.replace("on     node2 device  1", "on x device 1"))
    assert main([*words, "--nccl-tests", str(output)]) == 2
    assert "its hosts have different numbers of ranks" in capsys.readouterr().err
    assert main([*words, "--nccl-tests", str(tmp_path / "none.txt")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(words) == 2
    assert "--gpu starts from a file: give --nccl-tests" in capsys.readouterr().err
