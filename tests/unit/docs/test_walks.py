"""The walks of the design: a call enters the files that are named there, and no others."""

import re
import sys

import pytest
import torch
import torch.distributed as dist
from pages import ROOT
from torch import nn
from training import train

from torchspmd.step import compile

STEP = str(ROOT / "src" / "torchspmd" / "step")


def entered(call):
    """The files of the step that a call enters."""
    files = set()

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(STEP):
            files.add(frame.f_code.co_filename[len(STEP) + 1 :])

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def named(*beginnings):
    """The files in the parts of the design that begin so; names alone count anywhere."""
    text = (ROOT / "docs" / "design.md").read_text()
    parts = re.split(r"\n(?=\*\*|#)", text)
    found = [part for part in parts if part.startswith(beginnings)]
    assert len(found) == len(beginnings)
    return {name for part in found for name in re.findall(r"`([\w/]+\.py)`", part)}


def missing(files, names):
    return sorted(
        file for file in files if file not in names and file.split("/")[-1] not in names
    )


def test_a_call_goes_where_the_design_says(alone, monkeypatch):
    monkeypatch.setenv("TORCHSPMD_SHADOW", "3")  # as users have it
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optim = torch.optim.AdamW(model.parameters(), fused=True)
    call = model, optim, torch.randn(3, 4)
    with compile(train, parallel="replicate", overlap=True) as step:
        first = entered(lambda: step(*call))
        for _ in range(4):
            step(*call)
        steady = entered(lambda: step(*call))
    walk = named("**The first call**")
    asked = named("**An edit of a graph**", "**What passes and checks ask")
    assert missing(first, walk | asked) == []
    assert steady == named("**A steady call**")
    assert first > steady
