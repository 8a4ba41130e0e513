"""A GPU of a hardware file, as a rehearsal shows it to a script."""

from functools import partial
from typing import Any

from torchspmd.predict.collectives import collective_seconds, place
from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import Hardware
from torchspmd.rehearse.device import Gpu
from torchspmd.rehearse.world import World
from torchspmd.step.graph.cost import CostModel

__all__ = ["rehearsed_gpu"]

_SMALL, _LARGE = 1 << 20, 1 << 26  # bytes of an all-reduce


def rehearsed_gpu(gpu: Hardware, network: Hardware, world: World) -> Gpu:
    """What a script is told of the GPU, and what compiled steps choose by."""
    major, _, minor = gpu.compute_capability.partition(".")
    return Gpu(
        gpu.title,
        gpu.nbytes("total"),
        (int(major or 9), int(minor or 0)),
        count=min(world.gpus_per_node, world.size) if world.size > 1 else 1,
        cost=partial(_cost, Figures(gpu, network), world),
    )


def _cost(figures: Figures, world: World) -> CostModel:
    """Rates of one rank, in place of those that ``cost="measure"`` would measure."""
    where = place(tuple(range(world.size)), world.gpus_per_node)
    short, long = (
        collective_seconds("all_reduce", nbytes, where, figures)
        for nbytes in (_SMALL, _LARGE)
    )
    sent = 2 * (world.size - 1) / world.size  # of each byte, by one rank
    rates: dict[str, Any] = {}
    if sent and long > short:
        rate = sent * (_LARGE - _SMALL) / (long - short)
        latency = max(short - sent * _SMALL / rate, 0.0)
        rates = {"network_bytes": rate, "latency_seconds": latency}
    return CostModel(
        flops=figures.number("flops.bfloat16_sustained", "flops.bfloat16_achieved"),
        memory_bytes=figures.number("bandwidth.memory"),
        launch_seconds=figures.number("launch.kernel"),
        **rates,
    )
