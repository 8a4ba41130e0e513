"""Texts that ranks exchange through a store, and what is said of ranks that do not come."""

import sys
import threading

import pytest
import torch.distributed as dist
from clock import Clock

from torchspmd import _torch
from torchspmd.comm.exchange import Exchanged, exchange, post_failure
from torchspmd.errors import AgreementError
from torchspmd.step.rank_agreement import exchange_texts


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sys.modules[exchange.__module__], "time", clock)
    return clock


@pytest.mark.parametrize(
    ("posted", "ranks", "texts", "missing"),
    [
        ({}, [], {}, ()),  # posts only
        ({}, [0], {0: "mine"}, ()),
        ({1: "yours"}, [0, 1], {0: "mine", 1: "yours"}, ()),
        ({1: "yours"}, [1], {1: "yours"}, ()),
        ({5: "here"}, [0, 1, 2, 3, 4, 5], {0: "mine", 5: "here"}, (1, 2, 3, 4)),
    ],
)
def test_what_comes(posted, ranks, texts, missing, clock):
    store = dist.HashStore()
    for rank, text in posted.items():
        store.set(f"key/{rank}", text)
    found = exchange(store, 0, "mine", ranks, "key", 4.0)
    assert clock.now < 5  # one deadline for all: one by one takes 16
    assert found == Exchanged(texts, 4.0, missing)
    assert store.get("key/0") == b"mine"


def test_a_rank_that_comes_later_is_waited_for():
    store = dist.HashStore()
    timer = threading.Timer(0.05, exchange, (store, 1, "late", [], "key", 0.0))
    timer.start()
    assert exchange(store, 0, "mine", [0, 1], "key", 30.0).texts[1] == "late"


def test_a_rank_that_fails_ends_the_waiting(clock):
    store = dist.HashStore()
    post_failure(store, 1, "failed", ValueError("no such bucket\nand more"))
    found = exchange(store, 0, "mine", [0, 1, 2], "key", 30.0, "failed")
    assert clock.now == 0
    assert found.failures == {1: "ValueError: no such bucket"}
    assert found.missing == (1, 2)


@pytest.mark.parametrize(
    ("missing", "told"), [((1,), "rank 1 did"), ((1, 4), "ranks 1, 4 did")]
)
def test_ranks_that_do_not_come_are_named(missing, told):
    with pytest.raises(AgreementError) as error:
        Exchanged({0: ""}, 60.0, missing).require_all("what", "The rule.")
    assert str(error.value) == f"what: {told} not come within 60 s. The rule."


def test_the_store_of_the_process_group_is_the_default(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(_torch, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    assert exchange_texts("mine", [3], "key", 1.0).texts == {3: "mine"}
