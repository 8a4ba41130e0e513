"""Locks: their text, there and back, and the sentences of what changed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchspmd import CommEvent, Kind, Ledger, Phase
from torchspmd.comm import Group, Total
from torchspmd.comm.folding import fold, unfold
from torchspmd.errors import LockError
from torchspmd.verify.contract.claim import natural
from torchspmd.verify.lock.changes import changes
from torchspmd.verify.lock.lockfile import (
    Lock,
    Memory,
    Recipe,
    Row,
    from_text,
    load_lock,
    lock_ledger,
    save_lock,
    to_text,
)

RECIPE = Recipe("train.py", "dp=2,tp=4", arguments=("--name", "two words"))
MEMORY = Memory(parameters=100, buffers=0, gradients=100, optimizer=208, activations=64)


def gather(module, phase="forward", **more):
    return Row(phase, module, "all_gather", "tp", "float32", **more)


def lock(rows, **more):
    return Lock("test_a.py::test", rows, **more)


# --- layers ---------------------------------------------------------------------------


def test_alike_layers_fold_and_unfold_at_every_depth():
    paths = [f"M.layers.{i}.experts.{j}.up" for i in (0, 1, 3) for j in range(4)]
    ((folded, content),) = fold((path, "same") for path in paths)
    assert (folded, content) == ("M.layers.[0-1,3].experts.[0-3].up", "same")
    assert unfold(folded) == paths


def test_what_differs_is_not_folded():
    rows = [("M.0.a", 1), ("M.1.a", 2), ("M.2.b", 1), ("M.3.a", 1), ("Global", 1)]
    assert fold(rows) == [("M.[0,3].a", 1), ("M.1.a", 2), ("M.2.b", 1), ("Global", 1)]


def test_a_root_that_is_a_number_and_brackets_of_others_stay():
    assert fold([("0", 1), ("1", 1)]) == [("0", 1), ("1", 1)]
    assert unfold("M.[a].[-].[]") == ["M.[a].[-].[]"]


def test_numbers_sort_as_numbers():
    names = ["M.layers.10", "M.layers.[2-3]", "M.embed", "M.layers.1"]
    assert sorted(names, key=natural) == [
        "M.embed",
        "M.layers.1",
        "M.layers.[2-3]",
        "M.layers.10",
    ]


_PATHS = st.lists(st.sampled_from(["a", "b", "0", "1", "2", "7"]), max_size=4).map(
    lambda parts: ".".join(["M", *parts])
)


@given(st.dictionaries(_PATHS, st.integers(0, 2), max_size=12))
def test_folding_loses_nothing(rows):
    folded = fold(rows.items())
    assert sorted((name, x) for path, x in folded for name in unfold(path)) == sorted(
        rows.items()
    )


# --- text -----------------------------------------------------------------------------

FULL = Lock(
    RECIPE,
    {
        gather("GPT.layers.0.mlp"): Total(1, 64),
        gather("GPT.layers.1.mlp"): Total(1, 64),
        gather("GPT.layers.10.mlp"): Total(2, 128),
        gather("GPT.head", "backward", implicit=True, cause="aten.mm: S -> R"): Total(
            1, 8
        ),
        Row("optimizer", "(too long ago)", "barrier", "ranks 0-7", "none"): Total(3),
    },
    MEMORY,
    setup=Total(4, 4096),
    notes=("a note with: everything # in it",),
    torch="2.13.0",
)

TEXT = """\
# What one step sends and holds. `torchspmd check` compares, `torchspmd lock` writes anew.
# Rows: phase module kind axis dtype count bytes; [0-3] is each of these modules.
torchspmd-lock 1
script train.py
arguments --name 'two words'
mesh dp=2,tp=4
rank 0
steps 1
skip 0
torch 2.13.0
note a note with: everything # in it

memory parameters 100
memory buffers 0
memory gradients 100
memory optimizer 208
memory activations 64

setup 4 4096
forward GPT.layers.[0-1].mlp all_gather tp float32 1 64
forward GPT.layers.10.mlp all_gather tp float32 2 128
backward GPT.head all_gather tp float32 1 8 implicit for "aten.mm: S -> R"
optimizer "(too long ago)" barrier "ranks 0-7" none 3 0
"""


def test_the_text():
    assert to_text(FULL) == TEXT
    assert from_text(TEXT, "comm.lock") == FULL


def test_the_order_of_events_does_not_matter():
    backwards = Lock(
        RECIPE,
        dict(reversed(FULL.rows.items())),
        MEMORY,
        FULL.setup,
        FULL.notes,
        "2.13.0",
    )
    assert to_text(backwards) == TEXT


_WORDS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp", "Cs"])
)
_ROWS = st.builds(
    Row,
    st.sampled_from(list(Phase)).map(str),
    st.sampled_from(
        ["Global", "M", "M.0", "M.1.x", "M.2.x", "M.a.0", "<lambda> x", ""]
    ),
    st.sampled_from(list(Kind)).map(str),
    _WORDS,
    st.sampled_from(["float32", "mixed"]),
    st.booleans(),
    st.none() | _WORDS,
)
_AMOUNTS = st.builds(Total, st.integers(1, 3), st.integers(0, 2))


@given(st.dictionaries(_ROWS, _AMOUNTS, max_size=8), st.none() | _AMOUNTS)
def test_there_and_back(rows, setup):
    before = lock(rows, setup=setup)
    after = from_text(to_text(before), "x")
    assert after == before and changes(before, after) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "comm.lock"
    save_lock(FULL, path)
    assert load_lock(path) == FULL
    assert [entry.name for entry in tmp_path.iterdir()] == ["comm.lock"]
    with pytest.raises(LockError, match=r"cannot write .*: No such file or directory"):
        save_lock(FULL, tmp_path / "no" / "comm.lock")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "x is not a lock that `torchspmd lock` or pytest wrote."),
        (
            "[package]\nname = 1\n",
            "x is not a lock that `torchspmd lock` or pytest wrote.",
        ),
        (
            "torchspmd-lock 9\n",
            "x is a lock of version 9; this torchspmd reads version 1. Write the lock "
            "again.",
        ),
        (
            TEXT.replace("mesh dp=2,tp=4\n", ""),
            "x is not complete (Recipe.__init__() missing 1 required positional "
            "argument: 'mesh'). Write the lock again.",
        ),
        (
            TEXT.replace("memory buffers 0\n", ""),
            "x is not complete (Memory.__init__() missing 1 required positional "
            "argument: 'buffers'). Write the lock again.",
        ),
        (
            TEXT + "forward GPT.head all_gathers tp float32 1 8\n",
            "x, line 24: cannot read 'forward GPT.head all_gathers tp float32 1 8' "
            "('all_gathers' is not a valid Kind). Write the lock again.",
        ),
        (
            TEXT + "forward GPT.layers.[1-2].mlp all_gather tp float32 1 8\n",
            "x, line 24: cannot read 'forward GPT.layers.[1-2].mlp all_gather tp float32 "
            "1 8' (the same communication has a line before). Write the lock again.",
        ),
        (
            TEXT + "sideways 1\n",
            "x, line 24: cannot read 'sideways 1' ('sideways' is unknown here, or there "
            "twice). Write the lock again.",
        ),
        (
            TEXT + "<<<<<<< HEAD\n",
            "x has conflict markers of a merge; write the lock again.",
        ),
    ],
)
def test_a_broken_lock_is_one_sentence(text, sentence):
    with pytest.raises(LockError) as caught:
        from_text(text, "x")
    assert str(caught.value) == sentence


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "comm.lock"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LockError, match="is not a text file"):
        load_lock(path)
    with pytest.raises(LockError, match=r"cannot read .*: No such file or directory"):
        load_lock(tmp_path / "other.lock")


# --- from a ledger --------------------------------------------------------------------


def test_a_ledger_becomes_rows():
    group = Group("1", (0, 1), axis="tp")
    event = CommEvent(
        Kind.ALL_GATHER, "c10d.x", "float32", (4,), 32, 16, group, source="a.py:3 f"
    )
    ledger = Ledger()
    for each in (event, event, event._replace(check=True)):
        ledger.append(each)
    made = lock_ledger(ledger, "test", setup=ledger)
    assert made.rows == {gather("Global"): Total(2, 64)}
    assert made.sources == {gather("Global"): "a.py:3 f"}
    assert made.setup == Total(2, 64) == made.total()


def test_dropped_events_cannot_be_locked():
    ledger = Ledger(max_events=0)
    group = Group("1", (0, 1), axis="tp")
    ledger.append(CommEvent(Kind.ALL_GATHER, "c10d.x", "float32", (4,), 32, 16, group))
    with pytest.raises(LockError, match="1 of 1 communications were dropped from the"):
        lock_ledger(ledger, "test")


# --- changes --------------------------------------------------------------------------


def test_one_more_says_what_where_and_why():
    mlp = gather("GPT.layers.3.mlp", "backward", cause="Shard(1) -> Replicate")
    now = lock({mlp: Total(1, 2**26)}, sources={mlp: "model.py:31 forward"})
    assert changes(lock({}), now) == [
        "+1 all_gather of float32 over tp, 64.0 MiB, backward of GPT.layers.3.mlp: "
        "redistribution from Shard(1) to Replicate at model.py:31 in forward"
    ]


def test_alike_layers_are_one_sentence_in_the_order_of_the_step():
    layers = {gather(f"GPT.layers.{i}.mlp", "backward"): Total(1, 8) for i in range(12)}
    first = {gather("GPT.head"): Total(2, 64)}
    assert changes(
        lock({**layers, **first}), lock({gather("GPT.head"): Total(1, 32)})
    ) == [
        "-1 all_gather of float32 over tp, 32 B, forward of GPT.head",
        "-1 all_gather of float32 over tp, 8 B, backward of GPT.layers.[0-11].mlp "
        "(each of 12)",
    ]


def test_other_sizes_dtypes_and_causes():
    a, b = gather("M"), gather("M")._replace(dtype="bfloat16")
    assert changes(lock({a: Total(2, 64)}), lock({a: Total(2, 32)})) == [
        "= 2 all_gather of float32 over tp, 32 B, forward of M, instead of 64 B"
    ]
    assert changes(lock({a: Total(2, 64)}), lock({a: Total(1, 100)})) == [
        "-1 all_gather of float32 over tp, 100 B, forward of M, instead of 64 B"
    ]
    assert changes(lock({a: Total(1, 64)}), lock({b: Total(1, 32)})) == [
        "+1 all_gather of bfloat16 over tp, 32 B, forward of M",
        "-1 all_gather of float32 over tp, 64 B, forward of M",
    ]
    old, new = a._replace(cause="Shard(0) -> Replicate"), a._replace(cause="P -> R")
    assert changes(lock({old: Total(1, 64)}), lock({new: Total(1, 64)})) == [
        "= 1 all_gather of float32 over tp, 64 B, forward of M: redistribution from P to "
        "R; before, redistribution from Shard(0) to Replicate"
    ]


def test_set_up_memory_and_notes():
    before = lock({}, memory=MEMORY, setup=Total(4, 64), notes=("old",))
    more = Memory(100, 0, 100, 208, activations=2**20)
    after = lock({}, memory=more, setup=Total(5, 96), notes=("new",))
    assert changes(before, after) == [
        "+1 communications before the first module call: 5, 96 B, instead of 4, 64 B",
        "+1048512 bytes of activations on a rank: 1.00 MiB instead of 64 B",
        "+ note: new",
        "- note: old",
    ]
    assert changes(before, before) == []
