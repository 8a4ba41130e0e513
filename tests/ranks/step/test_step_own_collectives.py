"""Collectives of ``torch.distributed`` inside a step: refused with the line."""

import torch
import torch.distributed as dist
from torch import nn

from torchspmd.errors import CaptureError
from torchspmd.step import DataParallel, compile


def all_reduce(loss):
    dist.all_reduce(loss)


def all_gather(loss):
    dist.all_gather([torch.zeros_like(loss) for _ in range(2)], loss)


def barrier(loss):
    dist.barrier()


def messages():
    found = []
    for call in (all_reduce, all_gather, barrier):
        model = nn.Linear(4, 2)

        def step(model, optim, x, call=call):
            loss = model(x).square().mean()
            loss.backward()
            optim.step()
            call(loss.detach())
            return loss

        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = compile(parallel_mode=DataParallel("replicate"))(step)
        try:
            compiled(model, optim, torch.ones(3, 4))
        except CaptureError as error:
            found.append(str(error))
    return found


def test_line_and_way_out(ranks2):
    for found in ranks2.run(messages):
        for text, call in zip(
            found, ("all_reduce", "all_gather", "barrier"), strict=True
        ):
            assert "the step calls torch.distributed itself" in text
            assert f"{call}: dist.{call}(" in text and __file__ in text
            assert "Gradients are reduced already" in text
            assert "functional" in text
