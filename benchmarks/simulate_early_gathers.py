"""What would gathers gain that start before the step in front of them ends?

    torchspmd predict benchmarks/simulate_early_gathers.py --world-size 2 --gpu h200

A rehearsal of a fully sharded GPT step (bfloat16, batch 64 of 512 tokens), whose graph is
then simulated: as the passes order it; in the best order within a step; and in the best
order where a shard is updated as soon as its gradient is scattered, and gathered for the
next forward while backward goes on. "Best" takes whatever is ready and needed first
whenever the network is free, makes updates at no cost and counts no memory.
``--slowdowns`` are those of the network beside computation.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from _models import GPT
from _step_variants import _optimizer, train_step
from torch import fx

from torchspmd.comm import Kind, Phase
from torchspmd.step import DataParallel, GraphModuleTransformation, compile
from torchspmd.step.graph.collectives import get_all_comm_blocks, latest_place
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.metadata import owner_of
from torchspmd.step.graph.simulate import simulate
from torchspmd.step.passes.bucket import block_of

STEPS = 6  # until one takes as long as the one before


@dataclass(frozen=True)
class Transfer:
    """A gather or scatter of one block's parameters, at places of the graph."""

    block: str
    ready: int  # the node behind which it may start; -1 for a gather
    read: int  # the node that reads a gather
    seconds: float
    is_forward: bool = False


def transfers_of(gm: fx.GraphModule, cost: CostModel) -> list[Transfer]:
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    found = []
    for each in get_all_comm_blocks(gm):
        owner, seconds = owner_of(each.start), cost.comm_seconds(each.event)
        name = block_of(owner.module) or owner.module
        if each.gathers_inputs():
            is_forward = owner.phase is Phase.FORWARD
            read = place[latest_place(each)]
            found.append(Transfer(name, -1, read, seconds, is_forward))
        elif each.kind is Kind.REDUCE_SCATTER:
            ready = max(map(place.__getitem__, each.sources()))
            found.append(Transfer(name, ready, len(place), seconds))
    return found


class Steps:
    """Steps in a row; the wire carries one transfer after another, the most urgent first.

    Attributes:
        now: How far computation is.
    """

    def __init__(self, transfers: list[Transfer], *, early: bool) -> None:
        self.now = 0.0
        self._early = early
        self._gathers = [each for each in transfers if each.ready < 0]
        self._scatters = [each for each in transfers if each.ready >= 0]
        self._free = 0.0  # when the wire is
        self._ends: dict[tuple[Transfer, int], float] = {}  # by transfer and step
        # When each may start, how urgent it is, and what it is.
        self._ready: list[tuple[float, tuple[int, int], Transfer, int]] = []

    def run(self, seconds: Sequence[float], step: int) -> None:
        """Make one step; seconds are those of its nodes."""
        for each in self._gathers:
            if step == 0 or not (self._early and each.is_forward):
                self._ready.append((self.now, (step, each.read), each, step))
        for place, computing in enumerate(seconds):
            for each in self._gathers:
                if each.read == place:
                    self._wait_for(each, step)
            self.now += computing
            while self._carry_one(self.now):
                pass
            for each in self._scatters:
                if each.ready == place:
                    urgency = (step + 1, self._first_read(each.block))
                    self._ready.append((self.now, urgency, each, step))
        for each in () if self._early else self._scatters:
            self._wait_for(each, step)

    def _first_read(self, block: str) -> int:
        return min(e.read for e in self._gathers if e.is_forward and e.block == block)

    def _wait_for(self, each: Transfer, step: int) -> None:
        while (each, step) not in self._ends:
            self._carry_one(math.inf)
        self.now = max(self.now, self._ends[each, step])

    def _carry_one(self, until: float) -> bool:
        """Carry the next transfer, if one starts before a moment."""
        start = max(
            self._free, min((when for when, *_ in self._ready), default=math.inf)
        )
        if start >= until:
            return False
        chosen = min((w for w in self._ready if w[0] <= start), key=lambda w: w[1])
        self._ready.remove(chosen)
        _, _, each, step = chosen
        self._free = self._ends[each, step] = start + each.seconds
        alike = [other for other in self._scatters if other.block == each.block]
        if (
            self._early
            and each in alike
            and all((o, step) in self._ends for o in alike)
        ):
            self._ready += [
                (self._free, (step + 1, gather.read), gather, step + 1)
                for gather in self._gathers
                if gather.is_forward and gather.block == each.block
            ]
        return True


def best_step(
    seconds: Sequence[float], transfers: list[Transfer], *, early: bool
) -> float:
    """How long the last of some steps takes."""
    steps, begin = Steps(transfers, early=early), 0.0
    for step in range(STEPS):
        begin = steps.now
        steps.run(seconds, step)
    return steps.now - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", type=float, default=[2.8e9, 4.0e9])
    parser.add_argument("--slowdowns", nargs="+", type=float, default=[1.0, 1.3])
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--no-reshard", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("nccl")
    for network in options.networks:
        # So that it computes as long as two ranks that share an H200 (measured).
        cost = CostModel(4.3e14, 2.2e12, network, latency_seconds=1e-4)
        passes = GraphModuleTransformation(enable_graph_optimization=True, cost=cost)
        mode = DataParallel("fully_shard", reshard_after_forward=not options.no_reshard)
        step = compile(gm_transformation=passes, parallel_mode=mode)(train_step)
        model = GPT(vocabulary=options.vocabulary, tied=False)
        model = model.to("cuda", torch.bfloat16)
        step(model, _optimizer(model), torch.zeros(64, 512, dtype=torch.long).cuda())
        gm = step.programs[-1].graph
        seconds = [cost.compute_seconds(node) for node in gm.graph.nodes]
        print(f"{network / 1e9:.1f} GB/s, {sum(seconds) * 1e3:.0f} ms of computing")
        for slower in options.slowdowns:
            slow = replace(
                cost,
                network_bytes=network / slower,
                latency_seconds=cost.latency_seconds * slower,
            )
            transfers = transfers_of(gm, slow)
            figures = {
                "ordered by the passes": simulate(gm.graph, slow).step_seconds,
                "best within a step": best_step(seconds, transfers, early=False),
                "best with early gathers": best_step(seconds, transfers, early=True),
            }
            told = ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in figures.items())
            print(f"  {slower} times slower beside computation: {told}", flush=True)


if __name__ == "__main__":
    main()
