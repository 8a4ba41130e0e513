"""Which node each rank is on."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchspmd.errors import UsageError

__all__ = ["GPUS_PER_NODE", "Nodes", "nodes_by_host", "read_nodes"]

GPUS_PER_NODE = 8  # where nobody says otherwise
BLOCK, CYCLIC = "block", "cyclic"
_SHOWN = 6  # problems in one message


@dataclass(frozen=True, slots=True)
class Nodes:
    """How ranks are spread over nodes: they fill one after the other, or as given.

    Attributes:
        gpus_per_node: The most ranks of a node.
        order: The node of each rank; empty where ranks fill nodes in their order.

    Example:
        >>> Nodes(2).of(3), Nodes(2, order=(0, 1, 0, 1)).of(2)
        (1, 0)
    """

    gpus_per_node: int = GPUS_PER_NODE
    order: tuple[int, ...] = ()

    def of(self, rank: int) -> int:
        """The node of a rank."""
        return self.order[rank] if self.order else rank // self.gpus_per_node

    def environment(self, rank: int, size: int) -> dict[str, int]:
        """What a launcher tells a rank of its node.

        >>> Nodes(2, order=(0, 1, 0, 1)).environment(2, size=4)["LOCAL_RANK"]
        1
        """
        nodes = [self.of(each) for each in range(size)]
        return {
            "LOCAL_RANK": nodes[:rank].count(nodes[rank]),
            "LOCAL_WORLD_SIZE": nodes.count(nodes[rank]),
            "GROUP_RANK": nodes[rank],
            "GROUP_WORLD_SIZE": max(nodes) + 1,
        }


def read_nodes(text: str, size: int, gpus_per_node: int) -> Nodes:
    """The nodes that ``--rank-order`` means.

    Args:
        text: ``block``, ``cyclic``, or a file with the host of each rank, one a line.
        size: Ranks.
        gpus_per_node: The most ranks of a node.

    Raises:
        UsageError: There is no such order, or the file is not one of these ranks.

    >>> read_nodes("cyclic", 4, 2).order
    (0, 1, 0, 1)
    """
    if text == BLOCK:
        return Nodes(gpus_per_node)
    if text == CYCLIC:
        count = -(-size // gpus_per_node)
        return Nodes(gpus_per_node, tuple(rank % count for rank in range(size)))
    try:
        lines = Path(text).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise UsageError(
            f"--rank-order {text}: give {BLOCK}, {CYCLIC}, or a file with the host of "
            f"each rank, one a line ({reason})."
        ) from None
    hosts = [line.strip() for line in lines if line.strip()]
    return nodes_by_host(hosts, size, gpus_per_node, f"--rank-order {text}")


def nodes_by_host(
    hosts: Sequence[str | int], size: int, gpus_per_node: int, what: str
) -> Nodes:
    """The nodes of ranks whose hosts are listed, in the order in which these appear.

    Raises:
        UsageError: The list is one of other ranks, or a host has too many of them; the
            text begins with ``what``.

    >>> nodes_by_host(["b", "a", "b"], 3, 2, "hosts").order
    (0, 1, 0)
    """
    if len(hosts) != size:
        raise UsageError(
            f"{what}: it has the hosts of {len(hosts)} ranks, not of {size}."
        )
    crowded = [
        f"host {host} has {count} ranks, and a node has {gpus_per_node}"
        for host, count in Counter(hosts).items()
        if count > gpus_per_node
    ]
    if crowded:
        rest = len(crowded) - _SHOWN
        more = [f"and {rest} more such hosts"] if rest > 0 else []
        raise UsageError(f"{what}: {'; '.join(crowded[:_SHOWN] + more)}.")
    number = {host: node for node, host in enumerate(dict.fromkeys(hosts))}
    return Nodes(gpus_per_node, tuple(number[host] for host in hosts))
