"""Times of collectives from what nccl-tests printed.

The lines of an output that begin with ``#`` say on which hosts the ranks ran and, in newer
versions, which test it was; the others are one message size each.
"""

import re
from collections import Counter
from pathlib import Path

from torchspmd.errors import UsageError
from torchspmd.predict.hardware import Figure

__all__ = ["KINDS", "read_nccl_tests"]

# The program's name, and ours.
KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
}
_RANK = re.compile(r"^#\s*Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device", re.MULTILINE)
_NAME = re.compile("|".join(KINDS))
# bytes, count, type, reduction, root, then microseconds out of place
_SIZE = re.compile(r"^\s*(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+([\d.]+)\s", re.MULTILINE)


def read_nccl_tests(path: Path) -> tuple[str, Figure]:
    """The figure of a hardware file that an output of nccl-tests gives.

    Returns:
        Its key, as in ``collectives.all_reduce_2x8`` for 2 nodes of 8 ranks, and rows of
        bytes and seconds.

    Raises:
        UsageError: The file is no such output; the text has every problem.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--nccl-tests {path}: {error}.") from None
    head = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    name = _NAME.search(head) or _NAME.search(path.name)
    hosts = Counter(dict(_RANK.findall(text)).values())
    rows = sorted(
        {int(size): float(time) / 1e6 for size, time in _SIZE.findall(text)}.items()
    )
    rows = [row for row in rows if row[0] > 0 and row[1] > 0]
    problems = []
    if name is None:
        kinds = ", ".join(dict.fromkeys(KINDS))
        problems.append(
            f"neither its lines nor its name say which test it was: rename it, so that it "
            f"contains one of {kinds}"
        )
    if not hosts:
        problems.append(
            'no line like "#  Rank  0 ... on HOST device": keep the lines that begin with #'
        )
    elif len(set(hosts.values())) > 1:
        problems.append(f"its hosts have different numbers of ranks: {dict(hosts)}")
    if not rows:
        problems.append("no lines of sizes and times")
    if problems or name is None:
        raise UsageError(f"--nccl-tests {path}: {'; '.join(problems)}.")
    nodes, on_node = len(hosts), next(iter(hosts.values()))
    key = f"collectives.{KINDS[name.group()]}_{nodes}x{on_node}"
    source = f"nccl-tests, {nodes} nodes of {on_node} ranks, {path.name}"
    return key, Figure(tuple((float(size), time) for size, time in rows), source)
