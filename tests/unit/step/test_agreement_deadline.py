"""Ranks that do not come are waited for once, however many they are."""

import time

import pytest
import torch.distributed as dist

from torchspmd import _torch
from torchspmd.step.rank_agreement import exchange

pytestmark = pytest.mark.unit


def test_one_deadline_for_all_ranks(monkeypatch):
    store = dist.HashStore()
    store.set("key/5", "here")
    monkeypatch.setattr(_torch, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    start = time.monotonic()
    texts, missing = exchange("mine", [0, 1, 2, 3, 4, 5], "key", seconds=0.4)
    assert time.monotonic() - start < 1.2  # one after the other: 1.6
    assert texts == {0: "mine", 5: "here"} and missing == [1, 2, 3, 4]
