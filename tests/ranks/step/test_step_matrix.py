"""Compiled steps on real ranks against one device with the whole batch."""

import pytest
import torch
import torch.distributed as dist
from step_models import MODELS, build, difference

from torchspmd.step import DataParallel, compile

TOLERANCE = 2e-5  # sums over ranks are taken in another order


def mean_step(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optim.step()
    optim.zero_grad()
    return loss


def train(model, optimizer, mode):
    """The largest difference from one device after three steps with a changing lr."""
    ours, reference = build(model, optimizer)
    step = compile(parallel_mode=mode, shadow=2)(mean_step)
    rank, size = dist.get_rank(), dist.get_world_size()
    worst = 0.0
    for number in range(3):
        torch.manual_seed(100 + number)
        batch = torch.randn(3 * size, 8)
        for each in (ours, reference):
            each[1].param_groups[0]["lr"] = 0.02 / (number + 1)
        torch.manual_seed(number)
        loss = step(*ours, batch[3 * rank : 3 * rank + 3].clone())
        torch.manual_seed(number)
        expected = mean_step(*reference, batch)
        if mode is not None:
            dist.all_reduce(loss)
            loss = loss / size
        worst = max(worst, (loss - expected).abs().item())
    return max(worst, difference(ours, reference)), len(step.programs)


def run_cases(cases):
    found = []
    for model, optimizer, mode in cases:
        parallel = None if mode == "default" else DataParallel(mode, reduce="avg")
        try:
            found.append((model, optimizer, mode, *train(model, optimizer, parallel)))
        except Exception as error:
            raise AssertionError((model, optimizer, mode)) from error
    return found


# Not Adam for every model: it turns gradients that are zero but for rounding (a bias before
# batch norm) into steps of full size. All optimizers are compared bit for bit on one
# device in tests/unit/step.
MOMENTUM = [(model, "momentum") for model in MODELS]
# Every rank updates whole parameters as one device does: a few optimizers show it.
SOME = ("adam_foreach", "adamw_fused", "two_groups", "lion")
# Shards have states of their own. Adafactor is refused by name.
MORE = (*SOME, "adagrad", "rmsprop", "momentum_fused", "radam", "asgd_foreach")
# No statistics or masks over the batch.
PLAIN = [case for case in MOMENTUM if case[0] in ("mlp", "tied", "attention", "partly")]
CASES = {
    "default": MOMENTUM + [("linear", optimizer) for optimizer in (*SOME, "adafactor")],
    "replicate": PLAIN + [("linear", optimizer) for optimizer in SOME],
    "fully_shard": PLAIN + [("linear", optimizer) for optimizer in MORE],
}


@pytest.mark.parametrize("world", ["ranks2", "ranks4"])
@pytest.mark.parametrize("mode", CASES)
def test_steps_equal_one_device(world, mode, request):
    # On four ranks a part of them: capture takes most of the time.
    cases = [(*case, mode) for case in CASES[mode][:: 1 if world == "ranks2" else 4]]
    for found in request.getfixturevalue(world).run(run_cases, cases, timeout=120):
        for *case, worst, num_programs in found:
            assert worst < TOLERANCE, (case, worst)
            assert num_programs <= 2, (case, num_programs)
