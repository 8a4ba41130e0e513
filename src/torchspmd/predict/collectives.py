"""Seconds of one communication: by its kind, its bytes, and where its ranks are.

What counts is on how many nodes a group is and how many of its ranks are on each: a group
with one rank on each node has one port, one with eight has eight. The forms are those of
NCCL's own tuning, a latency that grows with the hops and a rate; the rates are measured.
"""

import math
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from torchspmd.predict.figures import Figures, Line
from torchspmd.predict.hardware import Hardware, Rows
from torchspmd.rehearse.nodes import Nodes
from torchspmd.rehearse.recording import Comm

__all__ = ["CommCost", "Link", "Placement", "place", "price_comm"]


class _Protocol(NamedTuple):
    """Seconds and rates of one of NCCL's protocols (tuning.cc), rings and trees.

    Attributes:
        ring, tree: Before the first hop.
        ring_hop, tree_hop: Of a hop over NVLink.
        ring_network, tree_network: Of a hop over the network.
        rate: Part of the link's rate that carries payload.
    """

    ring: float
    tree: float
    ring_hop: float
    tree_hop: float
    ring_network: float
    tree_network: float
    rate: float


def _protocols(figures: Figures) -> list[_Protocol]:
    """Simple comes first."""
    _, rows = figures.table("collectives.protocols")
    return [_Protocol(*row) for row in rows]


class Link(StrEnum):
    """What a communication goes over, and shares with others at the same time."""

    NVLINK = "NVLink"
    NETWORK = "network"
    NONE = "none"  # a group of one rank


class Placement(NamedTuple):
    """Where the ranks of a group are.

    Attributes:
        ranks: How many.
        nodes: On how many nodes.
        on_node: The most ranks on one node.
    """

    ranks: int
    nodes: int
    on_node: int


class CommCost(NamedTuple):
    """What a communication takes when it has its link for itself."""

    seconds: float
    link: Link
    placement: Placement


def place(ranks: tuple[int, ...], nodes: Nodes) -> Placement:
    """On which nodes they are."""
    counts = Counter(map(nodes.of, ranks))
    return Placement(len(ranks), len(counts), max(counts.values(), default=1))


def price_comm(comm: Comm, figures: Figures, nodes: Nodes, rank: int) -> CommCost:
    """The cost of a communication, as seen by this rank."""
    if comm.peer >= 0:
        where = place((rank, comm.peer) if comm.peer != rank else (rank,), nodes)
        seconds = _between_two(comm.payload_bytes, where, figures)
    else:
        where = place(comm.ranks, nodes)
        seconds = collective_seconds(comm.kind, comm.payload_bytes, where, figures)
    if where.ranks <= 1:
        return CommCost(figures.number("launch.kernel"), Link.NONE, where)
    link = Link.NVLINK if where.nodes == 1 else Link.NETWORK
    return CommCost(seconds, link, where)


def collective_seconds(
    kind: str, nbytes: int, where: Placement, figures: Figures
) -> float:
    """Seconds of a collective of this many bytes, counted as the whole tensor."""
    if where.ranks <= 1:
        return figures.number("launch.kernel")
    if kind == "barrier":
        nbytes = 4
        kind = "all_reduce"
    if where.ranks == where.nodes * where.on_node:
        table = f"collectives.{kind}_{where.nodes}x{where.on_node}"
        measured_on, rows = figures.table(table)
        if rows:
            link = _link_ratio(figures, measured_on) if where.nodes == 1 else 1.0
            return _measured(rows, nbytes, link)
    price = _on_one_node if where.nodes == 1 else _over_nodes
    return price(kind, nbytes, where, figures)


def _measured(rows: Rows, nbytes: int, link: float) -> float:
    """Between the sizes of nccl-tests; outside of them, at the last one's rate or time.

    Args:
        rows: Bytes and seconds.
        nbytes: Of the tensor.
        link: The rate of the links here, of that where it was measured.
    """
    line = Line([(math.log2(size), seconds) for size, seconds in rows])
    (_, shortest), (largest, slowest) = rows[0], rows[-1]
    seconds = (
        line.at(math.log2(max(nbytes, 1)))
        if nbytes <= largest
        else (slowest * nbytes / largest)
    )
    return shortest + (seconds - shortest) / link


def _link_ratio(figures: Figures, measured_on: Hardware) -> float:
    return figures.number("bandwidth.nvlink") / measured_on.number("bandwidth.nvlink")


def _on_one_node(kind: str, nbytes: int, where: Placement, figures: Figures) -> float:
    if kind == "all_reduce":
        return _all_reduce_on_node(nbytes, where.ranks, figures)
    table = {
        "all_gather": "all_gather_ranks",
        "reduce_scatter": "reduce_scatter_ranks",
        "all_to_all": "all_to_all_ranks",
    }.get(kind, "all_gather_ranks")  # broadcast, reduce, gather, scatter: a ring once
    latency, rate = _by_ranks(table, where.ranks, figures)
    return latency + nbytes / rate


def _by_ranks(table: str, ranks: int, figures: Figures) -> tuple[float, float]:
    """Latency and bytes a second, between the group sizes that were measured.

    Those of another GPU carry over by the rates of their links.
    """
    measured_on, rows = figures.table(f"collectives.{table}")
    link = _link_ratio(figures, measured_on)
    latencies = Line([(math.log2(row[0]), row[1]) for row in rows])
    rates = Line([(math.log2(row[0]), row[2]) for row in rows])
    at = math.log2(ranks)
    return latencies.at(at), rates.at(at) * link


def _all_reduce_on_node(nbytes: int, ranks: int, figures: Figures) -> float:
    latency, rate = _by_ranks("all_reduce_ranks", ranks, figures)
    measured_on, rows = figures.table("collectives.all_reduce")
    if ranks <= 4 or not rows:
        return latency + nbytes / rate
    # Of eight ranks, with what they do in the switch on Hopper and later.
    bus = Line([(math.log2(size), rate) for size, rate in rows])
    reached = bus.at(math.log2(max(nbytes, 1))) * _link_ratio(figures, measured_on)
    return max(latency, 2 * (ranks - 1) / ranks * nbytes / reached)


def _over_nodes(kind: str, nbytes: int, where: Placement, figures: Figures) -> float:
    if kind == "all_to_all":
        return _all_to_all(nbytes, where, figures)
    best = figures.network_number("port") * figures.network_number("efficiency")
    n = where.ranks
    rate = best * _ramp(nbytes, where, figures) * where.on_node
    once = nbytes / (min(rate, _nvlink(figures)) * n / (n - 1))
    # NCCL takes the quickest of its algorithms and protocols, by size and nodes.
    return min(_algorithms(kind, once, where, figures))


def _nvlink(figures: Figures) -> float:
    """Bytes a second that one GPU reaches to others of its node."""
    part = figures.number("collectives.nvlink")
    return part * figures.number("bandwidth.nvlink")


def _algorithms(
    kind: str, once: float, where: Placement, figures: Figures
) -> Iterator[float]:
    """A ring; for sums on all ranks, it goes around twice, or a tree goes up and down.

    Args:
        kind: Of the collective.
        once: Seconds for the payload to go around.
        where: The ranks are.
        figures: Of NCCL and the network.
    """
    protocols = _protocols(figures)
    # The network's own latency is that of Simple.
    slower = figures.network_number("latency") / protocols[0].ring_network
    between, inside = where.nodes - 1, where.ranks - where.nodes
    levels = math.ceil(math.log2(where.nodes))
    for protocol in protocols:
        payload = once / protocol.rate
        ring = protocol.ring + slower * protocol.ring_network * between
        ring += protocol.ring_hop * inside
        if kind != "all_reduce":
            yield ring + payload
            continue
        yield 2 * ring + 2 * payload
        tree = slower * protocol.tree_network * levels
        tree += protocol.tree_hop * (where.on_node - 1)
        # The root of a tree sends and receives everything.
        yield protocol.tree + 2 * tree + 2 * payload / figures.network_number("tree")


def _ramp(nbytes: int, where: Placement, figures: Figures) -> float:
    rows = figures.network_rows("ramp")
    line = Line([(math.log2(size), part) for size, part in rows])
    return line.at(math.log2(max(nbytes / where.ranks, 1)))


def _all_to_all(nbytes: int, where: Placement, figures: Figures) -> float:
    rows = figures.network_rows("all_to_all")
    latency = Line([(math.log2(n), seconds) for n, seconds in rows])
    outside = nbytes * (where.ranks - where.on_node) / where.ranks
    inside = nbytes - outside
    port = figures.network_number("port") * figures.network_number("wire")
    rate = port * (1 - figures.network_number("all_to_all_lost") / where.nodes)
    seconds = max(outside / rate, inside / _nvlink(figures))
    return latency.at(math.log2(where.nodes)) + seconds


def _between_two(nbytes: int, where: Placement, figures: Figures) -> float:
    base = _protocols(figures)[0].ring
    if where.nodes == 1:
        return base + nbytes / _nvlink(figures)
    rate = figures.network_number("port") * figures.network_number("efficiency")
    return base + figures.network_number("latency") + nbytes / rate
