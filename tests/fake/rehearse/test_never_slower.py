"""``overlap="auto"`` is never predicted to be slower than steps that leave nothing."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torchspmd
from torchspmd.predict.hardware import load_gpu
from torchspmd.predict.prediction import predict_time
from torchspmd.step.graph.cost import CostModel

VOCABULARY = 16384
ROUNDING = 1.0005  # of what is predicted
H100 = CostModel(6.7e14, 3.4e12, 3.9e11, launch_seconds=2e-6, latency_seconds=4e-5)


def linear_stack(layers, width):
    parts = [(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*(each for pair in parts for each in pair))


def transformer(layers, width):
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
    )


class GPT(nn.Module):
    """What is needed first, and reduced last, is large: the embedding."""

    def __init__(self, layers, width, vocabulary):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = transformer(layers, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        logits = self.head(self.body(self.embed(tokens)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def step(model, optim, batch):
    out = model(batch)
    loss = out if out.ndim == 0 else out.float().square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


MODELS = {
    "linear 10x100": lambda: (linear_stack(10, 100), (154, 100)),
    "linear 5x1024": lambda: (linear_stack(5, 1024), (12, 1024)),
    "linear 2x4096": lambda: (linear_stack(2, 4096), (8, 4096)),
    "transformer": lambda: (transformer(2, 512), (16, 256, 512)),
    "GPT": lambda: (GPT(4, 768, VOCABULARY), (16, 512)),
}


def predicted_seconds(rehearse, model, overlap, cost):
    gpu = load_gpu("h100")
    with rehearse(size=8) as recording:
        dist.init_process_group("nccl")
        made, shape = MODELS[model]()
        made = made.to("cuda", torch.bfloat16)
        optim = torch.optim.AdamW(made.parameters(), lr=1e-4, fused=True)
        run = torchspmd.compile(step, parallel="replicate", overlap=overlap, cost=cost)
        for _ in range(3):
            if model == "GPT":
                batch = torch.randint(VOCABULARY, shape, device="cuda")
            else:
                batch = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            run(made, optim, batch)
    return predict_time(recording, gpu).step_seconds


@pytest.mark.parametrize(
    ("model", "cost"),
    [*((model, None) for model in MODELS), ("linear 2x4096", H100), ("GPT", H100)],
)
def test_auto_is_never_predicted_to_be_slower(rehearse, model, cost):
    plain, auto = (
        predicted_seconds(rehearse, model, overlap, cost) for overlap in (False, "auto")
    )
    assert auto <= plain * ROUNDING
