"""The table of predicted and measured memory: its arithmetic, and that its rows parse."""

import json
import sys
from unittest import mock

import pytest
import record_allocator
import validate_memory
from validate_memory import ROWS, Row

pytestmark = pytest.mark.unit


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
    with mock.patch.object(validate_memory, "_output", return_value=output):
        measured = validate_memory.run(Row("x", "--model gpt", ranks=2))
    assert measured["steady step"] == {"allocated": 450, "reserved": 700}
    predicted = {**measured, "steady step": {"allocated": 458, "reserved": 630}}
    row = validate_memory.compare(Row("x", ""), measured, predicted)
    assert row["allocated, error %"] == pytest.approx(1.778, abs=1e-3)
    assert row["reserved, error %"] == pytest.approx(-10.0)
    assert row["steady, error %"] == 0
    lines = validate_memory.summary([row])
    assert "allocated: 1 of 1 rows within 2 %" in lines
    assert "reserved: 0 of 1 rows within 8 %" in lines
    assert validate_memory.markdown([row])[0].startswith("| row | ranks | allocated |")


def test_every_row_is_a_call_of_the_training_script(monkeypatch):
    monkeypatch.syspath_prepend(str(validate_memory.SCRIPT.parent))
    train = pytest.importorskip("train")
    for row in ROWS:
        monkeypatch.setattr(sys, "argv", ["train.py", *row.arguments.split()])
        options = train.arguments()
        assert (options.parallel == "none") == (row.ranks == 1), row.name
    assert len({row.name for row in ROWS}) == len(ROWS)


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
    ]
    assert record_allocator.compact(history) == {
        "requests": [100, [7, 1], -2, 0],
        "segments": [[2048, 0], [-2048, 0]],
    }
