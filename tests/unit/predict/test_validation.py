"""The table of predicted and measured memory: its arithmetic, and that its rows parse."""

import json
import sys
from pathlib import Path
from unittest import mock

import _rows
import pytest
import record_allocator
import validate_jobs
import validate_memory
import validate_time
from _rows import ALL_ROWS, Row


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
    lines = validate_time.summary([row, {**row, "error %": -15.0}])
    assert lines[0] == "mean error 10.0 %, worst 15.0 %"
    assert "1 of 2 rows within 10 %" in lines


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
    for row in ALL_ROWS:
        monkeypatch.setattr(sys, "argv", ["train.py", *row.arguments.split()])
        options = train.arguments()
        assert (options.parallel == "none") == (row.ranks == 1), row.name
    assert len({row.name for row in ALL_ROWS}) == len(ALL_ROWS)


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


def test_the_jobs_are_those_of_their_script():
    text = validate_jobs.SCRIPT.read_text()
    for name, jobs in validate_jobs.NAMES.items():
        listed = text.partition(f'    "{name}": [')[2].partition("]")[0]
        assert [each.strip() for each in listed.split(",") if each.strip()] == jobs
