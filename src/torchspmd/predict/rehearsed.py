"""A GPU of a hardware file, as a rehearsal shows it to a script."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torchspmd.comm import Group
from torchspmd.predict.collectives import collective_seconds, place
from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import Hardware
from torchspmd.rehearse.device import Gpu
from torchspmd.rehearse.world import World
from torchspmd.step.graph.cost import CostModel, Link

__all__ = ["rehearsed_gpu"]

_SMALL, _LARGE = 1 << 20, 1 << 26  # bytes of an all-reduce


def rehearsed_gpu(gpu: Hardware, network: Hardware, world: World) -> Gpu:
    """What a script is told of the GPU, and what compiled steps choose by."""
    major, _, minor = gpu.compute_capability.partition(".")
    return Gpu(
        gpu.title,
        gpu.nbytes("total"),
        (int(major or 9), int(minor or 0)),
        count=min(world.nodes.gpus_per_node, world.size) if world.size > 1 else 1,
        cost=partial(_cost, Figures(gpu, network), world),
    )


def _cost(figures: Figures, world: World, axes: Mapping[str, Group]) -> CostModel:
    """Rates of one rank, in place of those that ``cost="measure"`` would measure."""
    every = _link(figures, world, tuple(range(world.size)))
    links = {
        axis: link
        for axis, group in axes.items()
        if (link := _link(figures, world, group.ranks)) is not None and link != every
    }
    rates: dict[str, Any] = {} if every is None else every._asdict()
    return CostModel(
        flops=figures.number("flops.bfloat16_sustained", "flops.bfloat16_achieved"),
        memory_bytes=figures.number("bandwidth.memory"),
        launch_seconds=figures.number("launch.kernel"),
        axes=links,
        **rates,
    )


def _link(figures: Figures, world: World, ranks: tuple[int, ...]) -> Link | None:
    """What ranks are connected by; None where nothing is sent."""
    where = place(ranks, world.nodes)
    short, long = (
        collective_seconds("all_reduce", nbytes, where, figures)
        for nbytes in (_SMALL, _LARGE)
    )
    sent = 2 * (len(ranks) - 1) / max(len(ranks), 1)  # of each byte, by one rank
    if sent <= 0 or long <= short:
        return None
    rate = sent * (_LARGE - _SMALL) / (long - short)
    return Link(rate, max(short - sent * _SMALL / rate, 0.0))
