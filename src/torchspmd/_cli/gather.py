"""One report for all ranks of a real run: their sum, and which of them differ."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist

from torchspmd import _torch
from torchspmd.comm import Ledger, Total, ledger_from_dict, ledger_to_dict
from torchspmd.comm.exchange import exchange
from torchspmd.errors import WorldError

_WAIT_SECONDS = 60.0

# What ranks of one program have in common. Not the axis: a group without a mesh is known
# by its ranks, and those differ by nature.
_COMMON = ("module", "kind", "dtype", "phase")


@dataclass(slots=True)
class HeldStore:
    """The script's store, kept beyond ``destroy_process_group``."""

    store: Any = None


@contextlib.contextmanager
def hold_store() -> Iterator[HeldStore]:
    """Keep the store that the script's ranks meet in, for the time after the script."""
    held = HeldStore()
    plain_destroy = dist.destroy_process_group

    def destroy(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            held.store = _torch.default_store()
        plain_destroy(*args, **kwargs)

    with mock.patch.object(dist, "destroy_process_group", destroy):
        yield held
    if dist.is_initialized():
        held.store = _torch.default_store()


def gather_ledgers(
    ledger: Ledger, held: HeldStore, rank: int, world_size: int
) -> list[Ledger]:
    """Every rank hands in its ledger; rank 0 gets them all, the others none."""
    if held.store is None:
        raise WorldError(
            "the script never started a process group, so the ranks cannot be summed. "
            "Run it with --world-size N, without torchrun, for a single process."
        )
    text = json.dumps(ledger_to_dict(ledger))
    ranks = range(world_size) if rank == 0 else ()
    found = exchange(held.store, rank, text, ranks, "torchspmd/trace", _WAIT_SECONDS)
    texts = found.require_all(
        "torchspmd trace, the ledgers of all ranks",
        "Did they fail, or do fewer steps than rank 0?",
    )
    return [
        ledger_from_dict(json.loads(texts[other]), f"the ledger of rank {other}")
        for other in ranks
    ]


def differing_ranks(ledgers: list[Ledger]) -> list[str]:
    """A sentence for each rank that did not communicate what rank 0 did."""
    first = ledgers[0].total_by(*_COMMON)
    lines = []
    for rank, ledger in enumerate(ledgers):
        own = ledger.total_by(*_COMMON)
        changes = [
            _sentence(key, own.get(key, Total()), first.get(key, Total()))
            for key in {**first, **own}
            if own.get(key, Total()) != first.get(key, Total())
        ]
        if changes:
            more = f", and {len(changes) - 3} more" if len(changes) > 3 else ""
            lines.append(
                f"Rank {rank} differs from rank 0: {'; '.join(changes[:3])}{more}."
            )
    return lines


def _sentence(key: tuple[object, ...], own: Total, first: Total) -> str:
    module, kind, dtype, phase = key
    return (
        f"{own.count} instead of {first.count} {kind} ({dtype}, "
        f"{own.payload_bytes} instead of {first.payload_bytes} bytes) "
        f"in {phase} of {module}"
    )
