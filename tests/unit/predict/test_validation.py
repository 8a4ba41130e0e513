"""The table of predicted and measured memory: its arithmetic, and that its rows parse."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import _rows
import _steps
import profile_row
import pytest
import record_allocator
import validate_jobs
import validate_memory
import validate_time
import write_error_bars
from _drawn_rows import drawn_rows
from _rows import ALL_ROWS, Row
from torch.autograd import DeviceType


def phase(name: str, allocated: int, reserved: int, now: int) -> str:
    figures = {"allocated_peak": allocated, "reserved_peak": reserved, "allocated": now}
    return json.dumps({"phase": name, **figures})


def test_a_row_is_compared_by_its_highest_period():
    output = "\n".join(
        [
            "a warning",
            phase("initialisation", 100, 200, 90),
            phase("step 0", 400, 600, 300),
            phase("step 1", 450, 600, 310),
            phase("step 2", 440, 700, 320),
        ]
    )
    with mock.patch.object(_rows, "_output", return_value=output):
        phases = _rows.run(Row("x", "--model gpt", ranks=2))
    steady = {"allocated_peak_bytes": 458, "reserved_peak_bytes": 630}
    memory = {"periods": {"steady step": steady}, "steady_bytes": 320}
    row = validate_memory.compare(Row("x", ""), phases, {"memory": memory})
    assert row["allocated, error %"] == pytest.approx(1.778, abs=1e-3)
    assert row["reserved, error %"] == pytest.approx(-10.0)
    assert row["steady, error %"] == 0
    lines = validate_memory.summary([row])
    assert "allocated: 1 of 1 rows within 2 %" in lines
    assert "reserved: 0 of 1 rows within 8 %" in lines
    assert _rows.markdown([row])[0].startswith("| row | ranks | allocated |")


def test_a_row_is_compared_by_a_step_in_a_row_with_others():
    seconds = {"wall": [3, 4, 5], "event": [3, 4, 5], "host": [1, 2, 3], "in_a_row": 2}
    phases = [{"phase": "step 0"}, {"phase": "seconds", **seconds}]
    prediction = {"step_seconds": 2.1, "host_issue_seconds": 1.0}
    row = validate_time.compare(Row("x", ""), phases, prediction)
    assert row["error %"] == pytest.approx(5)
    assert row["host"] == 2000


def test_errors_are_told_whatever_their_sign():
    assert _rows.told_errors([-15.0, 5.0, *8 * [4.0]]) == (
        "10 rows: mean error 5.2 %, median 4.0 %, nine of ten within 5.0 %, "
        "worst 15.0 %, 9 within 10 %"
    )


def test_a_row_that_fails_is_told_and_leaves_the_others(tmp_path, capsys):
    def output(command, environment):
        if "moe" in command:
            raise _rows.RunError("exit code 1")
        return phase("step 0", 1, 1, 1)

    rows = [Row("bad", "--model moe"), Row("good", "--model gpt")]
    with mock.patch.object(_rows, "_output", output):
        measured = _rows.measure(rows, tmp_path / "rows.json")
    assert list(measured) == ["good"]
    assert json.loads((tmp_path / "rows.json").read_text()) == measured
    assert _rows.measure(rows, limit=-1) == {}
    told = capsys.readouterr().err
    assert "bad: failed, left out: exit code 1" in told
    assert "good: left out, the time is up" in told


def test_every_row_is_a_call_of_the_training_script(monkeypatch):
    monkeypatch.syspath_prepend(str(_rows.SCRIPT.parent))
    train = pytest.importorskip("train")
    rows = [*ALL_ROWS, *drawn_rows(8), *drawn_rows(9)]
    for row in rows:
        monkeypatch.setattr(sys, "argv", ["train.py", *row.arguments.split()])
        options = train.arguments()
        assert (options.parallel == "none") == (row.ranks == 1), row.name
    assert len({row.name for row in rows}) == len(rows)


@pytest.mark.parametrize("seed", [8, 9])
def test_drawn_rows_were_predicted_before_they_were_measured(seed):
    rows = [row.name for row in drawn_rows(seed)]
    measured, predicted = (
        json.loads((_steps.MEASURED / f"h200_drawn_{seed}{end}.json").read_text())
        for end in ("", "_predicted")
    )
    assert list(predicted) == rows
    assert list(measured) == rows[: len(measured)]
    assert len(measured) >= 18


def test_a_seed_draws_runs_of_every_kind():
    arguments = " ".join(row.arguments for row in drawn_rows(8))
    for word in ("fp32", "bf16", "autocast", "sgd", "--recompute", "--compile"):
        assert word in arguments
    assert drawn_rows(8) != drawn_rows(9)


def test_the_measured_rows_are_rows_with_seconds():
    path = Path(_rows.__file__).parent / "measured" / "h200.json"
    measured = json.loads(path.read_text())
    rows = {row.name: row for row in ALL_ROWS}
    assert set(measured) <= set(rows)
    assert len(measured) >= 39
    for name, phases in measured.items():
        if rows[name].ranks > 1:  # those of ranks that share a GPU are not compared
            continue
        seconds = validate_time.measured_seconds(phases)
        assert 0 < seconds["host"] <= 1.05 * seconds["alone"], name


def test_a_recorded_history_has_no_addresses():
    def entry(action, addr, size, stream=0):
        return {"action": action, "addr": addr, "size": size, "stream": stream}

    history = [
        entry("segment_alloc", 64, 2048),
        entry("alloc", 64, 100),
        entry("alloc", 1024, 7, stream=99),
        entry("free_requested", 64, 100),
        entry("free_completed", 64, 100),
        entry("snapshot", 0, 0),
        entry("segment_free", 64, 2048),
        entry("free_requested", 1024, 7),
        entry("alloc", 64, 9),
        entry("free_completed", 1024, 7),
    ]
    assert record_allocator.compact(history) == {
        "requests": [100, [7, 1], -2, 0, -1, 9],
        "segments": [[2048, 0], [-2048, 0]],
        "late": [(1, 6)],
    }


def test_a_job_is_compared_with_what_it_printed(tmp_path, capsys):
    real = {"ms": 10.0, "allocated": 2 << 20, "reserved": 4 << 20, "steady": 1 << 20}
    memory = {
        "allocated_peak_bytes": 2 << 20,
        "reserved_peak_bytes": 3 << 20,
        "steady_bytes": 1 << 20,
    }
    told = {"step_seconds": 0.009, "memory": memory}
    row = validate_jobs.compare("mlp", real, told)
    assert row["error %"] == pytest.approx(-10)
    assert row["reserved, error %"] == pytest.approx(-25)
    assert "error %: mean 10.0, median 10.0, worst 10.0" in validate_jobs.summary([row])
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps({"mlp": real}))
    with (
        mock.patch.object(sys, "argv", ["validate_jobs.py", "--measured", str(file)]),
        mock.patch.object(validate_jobs, "predict", return_value=told),
    ):
        validate_jobs.main()
    assert "mlp" in capsys.readouterr().out


def test_a_job_that_cannot_be_predicted_is_told_with_its_error(tmp_path, capsys):
    memory = dict.fromkeys(validate_jobs._BYTES, 1 << 20)
    told = {
        "mlp": {"step_seconds": 0.009, "memory": memory},
        "ppo": {"error": "no flops.complex64"},
    }
    real = {"ms": 10.0, "allocated": 1 << 20, "reserved": 1 << 20, "steady": 1 << 20}
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps(dict.fromkeys(told, real)))
    with (
        mock.patch.object(sys, "argv", ["validate_jobs.py", "--measured", str(file)]),
        mock.patch.object(validate_jobs, "predict", lambda name, _: told[name]),
    ):
        validate_jobs.main()
    assert "ppo: no flops.complex64" in capsys.readouterr().out
    failure = subprocess.CompletedProcess(
        [], 2, "", f"...\n{validate_jobs.SCRIPT} failed\n"
    )
    with mock.patch.object(validate_jobs.subprocess, "run", return_value=failure):
        assert validate_jobs.predict("ppo", "h200") == {"error": "jobs.py failed"}


def test_jobs_are_compared_with_what_was_predicted_before(tmp_path, capsys):
    memory = dict.fromkeys(validate_jobs._BYTES, 1 << 20)
    told = {"step_seconds": 0.009, "memory": memory}
    real = {"ms": 10.0, "allocated": 1 << 20, "reserved": 1 << 20, "steady": 1 << 20}
    measured, predicted = tmp_path / "measured.json", tmp_path / "predicted.json"
    measured.write_text(json.dumps({"mlp": real, "ppo": real}))
    with (
        mock.patch.object(validate_jobs, "predict", return_value=told),
        mock.patch.object(
            sys, "argv", ["", "--predict", str(predicted), "--only", "ppo"]
        ),
    ):
        validate_jobs.main()
    options = ["", "--measured", str(measured), "--predicted", str(predicted)]
    with mock.patch.object(sys, "argv", options):  # rehearses nothing
        validate_jobs.main()
    out = capsys.readouterr().out
    assert "ppo" in out
    assert "mlp" not in out


def test_the_jobs_are_those_of_their_script():
    text = validate_jobs.SCRIPT.read_text()
    for name, jobs in validate_jobs.NAMES.items():
        listed = text.partition(f'    "{name}": [')[2].partition("]")[0]
        assert [each.strip() for each in listed.split(",") if each.strip()] == jobs


def test_error_bars_are_those_of_the_recorded_rows():
    steps = write_error_bars.read()
    shipped = write_error_bars.BARS.read_text(encoding="utf-8")
    assert write_error_bars.text(steps) == shipped
    measured = json.loads((write_error_bars.MEASURED / "h200.json").read_text())
    rows = {step.row: step for step in steps if step.table == "h200"}
    assert set(rows) == {r.name for r in ALL_ROWS if r.ranks == 1} & set(measured)
    for name, step in rows.items():
        seconds = validate_time.measured_seconds(measured[name])["step"]
        assert step.measured == pytest.approx(1e3 * seconds, abs=0.01)


def test_the_pages_show_the_recorded_rows(tmp_path, monkeypatch):
    """As ``write_error_bars.py --recorded`` writes them."""
    steps, written = _steps.read(), {}
    for name in ("PAGE", "PICTURE", "DIGEST", "SUMMARY"):
        path = getattr(_steps, name)
        written[name] = path.read_text(encoding="utf-8")
        monkeypatch.setattr(_steps, name, tmp_path / path.name)
        (tmp_path / path.name).write_text(written[name], encoding="utf-8")
    _steps.write_pages(steps)
    for name, text in written.items():
        assert getattr(_steps, name).read_text(encoding="utf-8") == text
    assert written["DIGEST"].count("| drawn by seed 9 | 18 | 11.5 | 11.3 |") == 1


def test_a_page_without_a_place_for_its_table_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- bars: begin -->\nno end\n")
    with pytest.raises(
        SystemExit, match=r"page\.md has no lines <!-- bars: begin --> and"
    ):
        _steps._replace(page, "bars", ["| a |"])
    assert page.read_text() == "<!-- bars: begin -->\nno end\n"


def test_a_row_without_a_first_prediction_says_so(tmp_path, monkeypatch):
    told = {"a": {"step_seconds": 0.011}, "b": {"error": "no"}}
    (tmp_path / "first.json").write_text(json.dumps(told))
    monkeypatch.setattr(_steps, "MEASURED", tmp_path)
    monkeypatch.setattr(_steps, "TABLES", {"t": _steps.Table("some", "first")})
    host = _steps.Bar.HOST
    steps = [_steps.Step(host, "t", name, 10.0, 9.0, 100.0, 101.0) for name in "ab"]
    steps.append(_steps.Step(_steps.Bar.DEVICE, "t", "c", 10.0, 10.5))
    page = _steps.page(steps)
    assert "| a | host | 10.0 | 11.0 | +10.0 | 9.0 | -10.0 | 100 | +1.0 |" in page
    assert "| b | host | 10.0 | an error |  | 9.0 | -10.0 | 100 | +1.0 |" in page
    assert "| c | device | 10.0 |  |  | 10.5 | +5.0 |  |  |" in page
    *_, line = _steps.digest(steps)
    assert line == (
        "| some | 3 | 10.0 | 10.0 | 10.0 | 8.3 | 10.0 | 10.0 | 10.0 | 1 | 5.0 | 5.0 |"
    )


def test_a_file_of_steps_keeps_what_was_not_compared_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(_steps, "STEPS", tmp_path / "steps.csv")
    host, device = _steps.Bar.HOST, _steps.Bar.DEVICE
    steps = [_steps.Step(host, "t", "a", 10.0, 9.0)]
    steps.append(_steps.Step(device, "t", "b, c", 10.0, 9.0, 8.0, 0.0))
    _steps.write(steps)
    assert "near_host,t,a,10.00,9.00,,\n" in _steps.STEPS.read_text(encoding="utf-8")
    assert _steps.read() == sorted(steps)


def test_nine_of_ten_rows_are_within_an_error_bar():
    steps = [
        write_error_bars.Step(bar, "t", f"r{count}", 100.0, 100.0 + count)
        for bar in write_error_bars.Bar
        for count in range(1, 11)
    ]
    bars = tomllib.loads(write_error_bars.text(steps))
    assert {bar["error"] for bar in bars.values()} == {0.09}
    assert bars["near_host"]["source"].startswith("10 runs on one H200")
    whole, *parts = write_error_bars.summary(steps)
    assert whole.startswith("t, 40 rows: mean error 5.5 %")
    assert parts[0].startswith("  one_rank_h200, 10 rows: mean error 5.5 %")
    assert len(parts) == len(write_error_bars.Bar)


def test_a_profile_tells_the_host_from_what_it_waits_for():
    def event(name, start, end, device=DeviceType.CPU, user=False):
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(
            name=name, time_range=span, device_type=device, is_user_annotation=user
        )

    on_gpu = DeviceType.CUDA
    told = profile_row._host(
        [
            event(profile_row._WINDOW, 0, 9000, user=True),
            event("Optimizer.step", 0, 3000, user=True),
            event("Optimizer.step", 0, 9000, on_gpu, user=True),
            event("aten::mm", 0, 3000),
            event("cudaLaunchKernel", 1000, 2000),
            event("cudaStreamSynchronize", 4000, 7000),
            event("gemm", 2000, 5000, on_gpu),
            event("gemm", 4000, 8000, on_gpu),
        ]
    )
    steps = profile_row.STEPS
    assert told == {
        "profiled_ms": 9 / steps,
        "busy_ms": 6 / steps,
        "python_ms": 3 / steps,
        "waits_ms": 3 / steps,
    }


def test_jobs_without_a_prediction_are_named_and_left_out(monkeypatch, capsys):
    def predict(name, gpu):
        if name == "video":
            return {"error": "ValueError: no such thing"}
        memory = {"allocated_peak_bytes": 2**30}
        return {"step_seconds": 0.1, "host_issue_seconds": 0.01, "memory": memory}

    monkeypatch.setattr(write_error_bars.validate_jobs, "predict", predict)
    steps = list(write_error_bars.jobs())
    assert {"muon", "deit"} <= {step.row for step in steps}
    assert "video" not in {step.row for step in steps}
    assert {step.allocated_predicted for step in steps} == {1024.0}
    told = capsys.readouterr().err
    assert told == "h200_jobs_seventh, video: left out: ValueError: no such thing\n"
