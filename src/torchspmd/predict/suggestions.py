"""What would lower the peak: each change with the bytes that it frees.

A change takes away a part of some storages, and may need some bytes of its own. The peak
is counted again without them over the whole run, so that a change that only uncovers the
next peak is not praised for more than it brings.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchspmd.comm import group_label, of_axis
from torchspmd.predict.memory import MemoryAccount, count_memory
from torchspmd.rehearse.recording import Alloc, Category, Comm, Phase, Recording, Site

__all__ = ["Suggestion", "suggest"]

_WORTH = 0.01  # of the peak: less is not told
_STATES = frozenset(
    {
        Category.PARAMETER.value,
        Category.GRADIENT.value,
        Category.OPTIMIZER_STATE.value,
    }
)
_BATCH = frozenset(
    {Category.ACTIVATION.value, Category.TEMPORARY.value, Category.INPUT.value}
)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change to the script, and what it brings.

    Attributes:
        text: What to do.
        saved_bytes: By how much the peak falls.
        of: Which peak: ``allocated`` or ``reserved``.
        how: How the bytes were found.
    """

    text: str
    saved_bytes: int
    of: str
    how: str


@dataclass(frozen=True, slots=True)
class _Change:
    """Part of each storage that goes away, and bytes that are needed instead."""

    text: str
    parts: dict[int, float]
    needed: int
    how: str


def suggest(account: MemoryAccount) -> list[Suggestion]:
    """Changes that lower the peak by at least 1 %, the best first."""
    changes = [
        *_checkpoint(account),
        *_shard(account),
        *_reshard(account),
        *_fuse_optimizer(account),
        *_halve_batch(account),
    ]
    peak = account.peak.allocated
    suggestions = [
        Suggestion(change.text, peak - after, "allocated", change.how)
        for change, after in zip(changes, _peaks_after(account, changes), strict=True)
    ]
    suggestions += _expandable_segments(account)
    suggestions += _share_groups(account)
    worth = [each for each in suggestions if each.saved_bytes >= _WORTH * peak > 0]
    return sorted(worth, key=lambda each: -each.saved_bytes)


def _peaks_after(account: MemoryAccount, changes: list[_Change]) -> list[int]:
    """The allocated peak with each of the changes, by itself."""
    curve = account.curve
    affected: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for place, change in enumerate(changes):
        for storage, part in change.parts.items():
            affected[storage].append((place, part))
    gone = [0.0] * len(changes)
    peaks = [0.0] * len(changes)
    places = range(len(changes))
    rows = zip(curve.storages, curve.changes, curve.allocated, strict=True)
    for storage, size, allocated in rows:
        for place, part in affected.get(storage, ()):
            gone[place] += part * size
        for place in places:
            left = allocated - gone[place]
            peaks[place] = max(peaks[place], left)
    pairs = zip(peaks, changes, strict=True)
    return [int(peak) + change.needed for peak, change in pairs]


def _block(module: str) -> tuple[str, str] | None:
    """``Llama.layers.3.mlp`` is in ``Llama.layers.3``, one of ``Llama.layers.*``."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            before = parts[:place]
            return ".".join([*before, part]), ".".join([*before, "*"])
    return None


def _storages(account: MemoryAccount) -> Iterator[tuple[int, str, str, Site]]:
    """Number, category, module and site of every storage."""
    for storage, info in account.recording.storages.items():
        module = info.module or info.site.module
        yield storage, account.category(storage), module, info.site


def _checkpoint(account: MemoryAccount) -> Iterator[_Change]:
    """Keep only what each block of a list of blocks hands to the next one."""
    recomputed: set[str] = set()
    for event in account.recording.events:
        if isinstance(event, Alloc) and event.site.phase is Phase.RECOMPUTE:
            block = _block(event.site.module)
            recomputed.update(block[1:] if block else ())
    blocks: defaultdict[str, defaultdict[str, list[int]]]
    blocks = defaultdict(lambda: defaultdict(list))
    for storage, category, module, site in _storages(account):
        block = _block(module)
        is_saved = category == Category.ACTIVATION and site.phase is Phase.FORWARD
        if block is not None and is_saved:
            blocks[block[1]][f"{block[0]} {site.step}"].append(storage)
    nbytes = account.recording.storages
    for pattern, instances in sorted(blocks.items()):
        if pattern in recomputed:
            continue
        # The last one that a block saves is what the next one begins with.
        parts = {s: 1.0 for saved in instances.values() for s in sorted(saved)[:-1]}
        needed = max(sum(nbytes[s].nbytes for s in each) for each in instances.values())
        yield _Change(
            f"checkpoint the activations of {pattern} (torch.utils.checkpoint)",
            parts,
            needed,
            "counted without what the blocks save; one block is kept for recomputation",
        )


def _shard(account: MemoryAccount) -> Iterator[_Change]:
    """Parameters, gradients and optimizer state over the ranks, where they are whole."""
    recording = account.recording
    categories = {info.category for info in recording.storages.values()}
    if Category.GATHERED_PARAMETER in categories:
        return
    ranks, where = _replicas(recording)
    if ranks == 1:
        return
    parts: dict[int, float] = {}
    blocks: defaultdict[str, int] = defaultdict(int)
    for storage, category, module, _ in _storages(account):
        if category in _STATES:
            parts[storage] = 1 - 1 / ranks
        if category == Category.PARAMETER:
            block = _block(module or recording.storages[storage].name)
            blocks[block[0] if block else ""] += recording.storages[storage].nbytes
    yield _Change(
        "shard parameters, gradients and optimizer state "
        f"{where} (torch.distributed.fsdp.fully_shard)",
        parts,
        2 * max(blocks.values(), default=0),
        "counted with one share of each; two blocks of parameters are gathered at a time",
    )


def _replicas(recording: Recording) -> tuple[int, str]:
    """How many ranks hold the same parameters: those that add gradients up.

    Others hold other stages of a pipeline, or other parts of each parameter.
    """
    everyone = recording.world_size
    if everyone == 1:
        node = recording.nodes.gpus_per_node
        return node, f"on the {node} GPUs of a node"
    if not recording.groups:
        return everyone, f"over the {everyone} ranks"
    nbytes = sum(
        info.nbytes
        for info in recording.storages.values()
        if info.category == Category.PARAMETER
    )
    # A group that also adds up in forward has parts of layers, and sends activations.
    sent: Counter[tuple[str, tuple[int, ...]]] = Counter()
    forward: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for event in recording.events:
        if isinstance(event, Comm) and event.kind in ("all_reduce", "reduce_scatter"):
            sums = forward if event.site.phase is Phase.FORWARD else sent
            sums[event.label, event.ranks] += event.payload_bytes
    for group in [group for group in sent if forward[group] > sent[group] / 10]:
        del sent[group]
    ((label, ranks), most), *_ = [*sent.most_common(1), (("", (0,)), 0)]
    if most < nbytes / 4:  # not of all parameters, such as those of norms alone
        return 1, ""
    if len(ranks) == everyone:
        return everyone, f"over the {everyone} ranks"
    is_axis = of_axis(label).startswith("of axis")
    return len(ranks), (
        f"over the {len(ranks)} ranks of axis {label}" if is_axis else f"over {label}"
    )


def _reshard(account: MemoryAccount) -> Iterator[_Change]:
    """Gathered parameters that wait for backward."""
    sizes = {
        storage: account.recording.storages[storage].nbytes
        for storage, category, _, site in _storages(account)
        if category == Category.GATHERED_PARAMETER and site.phase is Phase.FORWARD
    }
    live = account.live(account.peak.row)
    if sum(size for storage, size in live.items() if storage in sizes) > 3 * max(
        sizes.values(), default=0
    ):
        yield _Change(
            "give gathered parameters back after forward (reshard_after_forward=True)",
            dict.fromkeys(sizes, 1.0),
            2 * max(sizes.values()),
            "counted without them; two groups are gathered at a time",
        )


def _fuse_optimizer(account: MemoryAccount) -> Iterator[_Change]:
    """Temporaries of foreach optimizers."""
    if not account.recording.can_fuse:
        return
    parts = {
        storage: 1.0
        for storage, category, _, site in _storages(account)
        if category == Category.TEMPORARY and site.phase is Phase.OPTIMIZER
    }
    if parts:
        yield _Change(
            "fused=True in the optimizer: it needs no temporaries",
            parts,
            0,
            "counted without the temporaries of the optimizer",
        )


def _halve_batch(account: MemoryAccount) -> Iterator[_Change]:
    """Half as many tokens or images on each rank."""
    parts = {
        storage: 0.5
        for storage, category, _, site in _storages(account)
        if category in _BATCH and site.phase not in (Phase.INIT, Phase.OPTIMIZER)
    }
    if parts:
        yield _Change(
            "half the batch of a rank, with twice the gradient accumulation; or half the "
            "sequence",
            parts,
            0,
            "counted with half of all activations, temporaries and inputs",
        )


def _expandable_segments(account: MemoryAccount) -> Iterator[Suggestion]:
    """The same allocations, simulated again."""
    if account.settings.expandable_segments:
        return
    settings = replace(account.settings, expandable_segments=True)
    again = count_memory(account.recording, account.gpu, settings)
    yield Suggestion(
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        account.reserved_peak - again.reserved_peak,
        "reserved",
        "simulated with it",
    )


def _share_groups(account: MemoryAccount) -> Iterator[Suggestion]:
    """Process groups over the same ranks, which have a communicator each."""
    same: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, ranks in account.recording.groups.items():
        same[ranks].append(name)
    ranks, names = max(same.items(), key=lambda item: len(item[1]), default=((), []))
    if len(names) > 2:  # two that should overlap need one each
        yield Suggestion(
            f"one process group instead of the {len(names)} over "
            f"{group_label('', ranks)}, each with buffers of NCCL; "
            "fully_shard(reshard_after_forward=N) makes one for each module",
            (len(names) - 1) * account.gpu.nbytes("nccl_communicator"),
            "outside of the allocator",
            "counted with one communicator",
        )
