"""What a reader of a ledger must know and could not see in the numbers."""

from collections.abc import Iterable, Sequence

from torchspmd.comm import CommEvent, Kind
from torchspmd.trace.modules import LOST

ON_REPLAY = (
    "a CUDA graph was replayed: what it communicates cannot be seen; record the run that "
    "captures it"
)
_ON_COMPILED = (
    "communication inside a region compiled by torch.compile is attributed to the module "
    "that was called, not to those inside it"
)
_ON_LOST = (
    "backward ran for modules whose forward was too many calls ago to know their names; "
    f"they are shown as {LOST}"
)


def on_event(event: CommEvent) -> Sequence[str]:
    """What to say about one communication; most often nothing."""
    if not event.compiled and event.kind is not Kind.UNKNOWN and event.module != LOST:
        return ()
    said = []
    if event.kind is Kind.UNKNOWN:
        said.append(
            f"{event.op} is an operator that torchspmd does not know: it is counted as "
            "unknown and its wire bytes as 0"
        )
    if event.compiled:
        said.append(_ON_COMPILED)
    if event.module == LOST:
        said.append(_ON_LOST)
    return said


def on_compiled_modules(paths: Iterable[str]) -> str:
    """What to say when operators were asked for and some ran compiled."""
    return (
        "operators inside regions compiled by torch.compile are not listed one by one: "
        + ", ".join(sorted(paths))
    )
