"""A ledger's file: round trips, whole writes, and the text of each refusal."""

import json
import os
import stat

import pytest
from hypothesis import given
from ledger_strategies import events, ledgers, make_event, make_ledger

from torchspmd.comm import (
    Ledger,
    ledger_from_dict,
    ledger_to_dict,
    load_ledger,
    save_ledger,
    storage,
)
from torchspmd.errors import LedgerError

_WRITER = "Give a file written by `torchspmd trace --out` or `save_ledger`."


def _data(**changes):
    ledger = make_ledger(make_event(module="GPT", source="a.py:1 f"))
    ledger.note("text")
    return {**json.loads(json.dumps(ledger_to_dict(ledger))), **changes}


def _error_text(call, *args):
    with pytest.raises(LedgerError) as caught:
        call(*args)
    assert isinstance(caught.value, ValueError)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


@given(ledgers())
def test_round_trip_through_a_file_is_equal(tmp_path_factory, ledger):
    path = tmp_path_factory.getbasetemp() / "round_trip.json"
    save_ledger(ledger, path)
    loaded = load_ledger(path)
    assert loaded == ledger
    assert loaded.rows == ledger.rows
    assert loaded.max_events == ledger.max_events


@given(events)
def test_loaded_events_have_the_types_of_new_ones(event):
    text = json.dumps(ledger_to_dict(make_ledger(event)))
    (loaded,) = ledger_from_dict(json.loads(text), "here").events
    assert loaded == event
    assert [type(part) for part in loaded] == [type(part) for part in event]
    assert hash(loaded) == hash(event)


def test_a_loaded_ledger_goes_on_counting():
    loaded = ledger_from_dict(_data(max_events=2), "here")
    for _ in range(3):
        loaded.append(make_event())
    assert len(loaded) == 4
    assert len(loaded.events) == 2
    assert loaded.dropped == 2


def test_reading_leaves_the_data_as_it_was():
    data = _data()
    copy = json.loads(json.dumps(data))
    first = ledger_from_dict(data, "here")
    assert data == copy
    assert ledger_from_dict(data, "here") == first


def test_file_says_what_it_is(tmp_path):
    path = tmp_path / "ledger.json"
    save_ledger(make_ledger(make_event()), str(path))
    data = json.loads(path.read_text())
    assert data["format"] == "torchspmd.ledger"
    assert data["version"] == 1
    assert data["groups"] == [{"name": "0", "ranks": [0, 1, 2, 3], "axis": "tp"}]
    assert path.read_text().endswith("}\n")


def test_unicode_names_survive(tmp_path):
    event = make_event(module="모델.слой.🔥", axis="轴", source='a "b"\\c.py:1 é')
    ledger = make_ledger(event)
    ledger.note("línea\nsegunda")
    save_ledger(ledger, tmp_path / "größe.json")
    assert load_ledger(tmp_path / "größe.json") == ledger


def test_missing_file(tmp_path):
    path = tmp_path / "absent.json"
    expected = f"cannot read {path}: No such file or directory."
    assert _error_text(load_ledger, path) == expected


def test_directory(tmp_path):
    expected = f"cannot read {tmp_path}: Is a directory."
    assert _error_text(load_ledger, str(tmp_path)) == expected


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b'{"format": ', b"\xff\xfe\x00", b"[" * 200_000],
    ids=["empty", "text", "cut off", "binary", "endless nesting"],
)
def test_not_json(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    assert _error_text(load_ledger, path) == f"{path} is not JSON. {_WRITER}"


@pytest.mark.parametrize("content", ["[]", "3", "null", "{}", '{"format": "onnx"}'])
def test_foreign_json(tmp_path, content):
    path = tmp_path / "foreign.json"
    path.write_text(content)
    assert _error_text(load_ledger, path) == (
        f"{path} is JSON, but not a torchspmd ledger: it has no "
        f'"format": "torchspmd.ledger". {_WRITER}'
    )


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_wrong_version(version):
    text = _error_text(ledger_from_dict, _data(version=version), "a.json")
    assert text == (
        f"a.json has ledger format version {version!r}; this torchspmd reads version 1. "
        "Write the file again with this version."
    )


def _without(key):
    data = _data()
    del data[key]
    return data


def _with_event(**changes):
    return _data(events=[{**_data()["events"][0], **changes}])


def _with_row(**changes):
    return _data(totals=[{**_data()["totals"][0], **changes}])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_without("totals"), "KeyError: 'totals'"),
        (_without("max_events"), "KeyError: 'max_events'"),
        (_with_row(kind="swirl"), "ValueError: 'swirl' is not a valid Kind"),
        (_with_row(phase=None), "ValueError: None is not a valid Phase"),
        (_with_row(count="many"), "ValueError: invalid literal for int() with base"),
        (_with_row(count=float("inf")), "OverflowError: cannot convert float infinity"),
        (_with_row(color="red"), "TypeError: "),
        (_with_row(module=[]), "TypeError: unhashable type: 'list'"),
        (_with_event(group=5), "IndexError: list index out of range"),
        (_with_event(kind="swirl"), "ValueError: 'swirl' is not a valid Kind"),
        (_with_event(shape=3), "TypeError: 'int' object is not iterable"),
        (_with_event(color="red"), "TypeError: "),
        (_data(max_events=-1), "UsageError: Ledger(max_events=-1): the number of"),
        (_data(max_events="all"), "TypeError: "),
        (_data(dropped_events=None), "TypeError: int() argument must be"),
        (_data(notes=["text"]), "AttributeError: 'list' object has no attribute"),
        (_data(groups=[{"name": "0"}]), "KeyError: 'ranks'"),
        (_data(totals={"a": 1}), ""),
    ],
)
def test_broken_entry(data, reason):
    text = _error_text(ledger_from_dict, data, "a.json")
    opening = f"a.json is a torchspmd ledger with a broken entry ({reason}"
    assert text[: len(opening)] == opening
    assert text.endswith("). Write the file again.")


def test_a_group_place_before_the_table_is_broken():
    text = _error_text(ledger_from_dict, _with_event(group=-1), "a.json")
    assert "with a broken entry" in text


def test_a_failing_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "ledger.json"
    path.write_text("old")

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(storage.Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        storage.write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    storage.write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to_and_stays(tmp_path):
    """As ``/dev/stdout``, which a user who may write to ``/dev`` must not lose."""
    reader, writer = os.pipe()
    link = tmp_path / "stdout"
    link.symlink_to(f"/proc/self/fd/{writer}")
    storage.write_whole(link, "new")
    assert os.read(reader, 9) == b"new"
    assert link.is_symlink()
    assert list(tmp_path.iterdir()) == [link]
    os.close(reader)
    os.close(writer)


def test_an_unwritable_text_leaves_nothing_behind(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        storage.write_whole(tmp_path / "new.json", "lone \ud800 surrogate")
    assert list(tmp_path.iterdir()) == []


def test_writing_over_a_directory_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    text = _error_text(save_ledger, Ledger(), folder)
    assert text == f"cannot write {folder}: Is a directory."
    assert list(tmp_path.iterdir()) == [folder]
    assert list(folder.iterdir()) == []


def test_a_missing_folder_is_named_not_a_temporary_file(tmp_path):
    path = tmp_path / "absent" / "ledger.json"
    text = _error_text(save_ledger, Ledger(), path)
    assert text == f"cannot write {path}: No such file or directory."


@pytest.mark.skipif(os.name != "posix", reason="permission bits are POSIX")
def test_the_file_has_the_permissions_of_any_new_file(tmp_path):
    plain, path = tmp_path / "plain", tmp_path / "ledger.json"
    plain.touch()
    save_ledger(Ledger(), path)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
