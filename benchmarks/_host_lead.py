"""When memory that another stream uses comes back: as soon as the host learns it.

``record_stream`` keeps a freed block until that stream is done with what it held when the
block was freed. The host asks at each allocation. Where it is ahead of the device, blocks
come back late, and the allocator takes new ones meanwhile; where it then finds the device
full, it waits for them, as it does on a GPU.

Here a recording is put on clocks: this host's, the kernels', the collectives', and the
slowest host's of those that meet in a collective, for which all devices wait. The allocator
is told when this host would see that a block is free.
"""

import dataclasses
from collections import deque

from torchspmd.predict.operators import Pricer
from torchspmd.predict.program import price_events
from torchspmd.rehearse.recording import (
    Comm,
    Event,
    Free,
    Recording,
    RecordStream,
    Synchronize,
    Wait,
)

# Entries of the queue between host and device; then the host waits. Measured by others: the
# first 1,000 of many kernels are launched at once, forums.developer.nvidia.com/t/68937.
_QUEUE = 1024
# Of these a collective takes five: its kernel, and on both streams an event that torch
# records and one that it waits for. With CUDA_DEVICE_MAX_CONNECTIONS=1, which nanotron asks
# for, all streams have one queue.
_ENTRIES = 5
# How much slower the slowest host is, among those whose ranks meet.
_SLOWER = 0.05
_FIRST = 1 << 40  # of the numbers of streams that no script has


def without_streams(recording: Recording) -> Recording:
    """As if the host were never ahead: blocks are there when they are freed."""
    events = [e for e in recording.events if not isinstance(e, RecordStream)]
    return dataclasses.replace(recording, events=events)


def with_late_frees(
    recording: Recording, pricer: Pricer, *, repeats: float = 1.0
) -> Recording:
    """The host learns of each block by itself that collectives are done with it.

    Kernels run one after the other, and so do collectives, beside them.

    Args:
        recording: Of one rank.
        pricer: Of its operators and collectives.
        repeats: How often what was rehearsed is done before the host waits for the device:
            by the end of it, the slowest host is behind by as much.
    """
    program = price_events(recording, pricer, range(len(recording.events)))
    prices = {item.place: item for item in program.items}
    host = kernels = collectives = together = 0.0
    queue: deque[float] = deque()  # ends of what was launched
    ends: dict[int, float] = {}  # of collectives
    used: set[int] = set()
    late: deque[tuple[float, int]] = deque()  # when a block is free, and its stream
    events: list[Event] = []
    for place, event in enumerate(recording.events):
        if (item := prices.get(place)) is not None:
            host += item.host
            if item.work:
                entries = _ENTRIES if isinstance(event, Comm) else 1
                while len(queue) + entries > _QUEUE:
                    host = max(host, queue.popleft())
                if isinstance(event, Comm):
                    others = host + _SLOWER * repeats * (host - together)
                    collectives = max(collectives, kernels, others) + item.work
                    ends[event.number] = collectives
                    if not event.is_async:
                        kernels = collectives
                    queue.extend([collectives] * entries)
                else:
                    kernels = max(kernels, host) + item.work
                    queue.append(kernels)
        if isinstance(event, Wait):
            kernels = max(kernels, ends.get(event.comm, 0.0))
        if isinstance(event, Synchronize):
            host = together = max(host, kernels, collectives)
        while late and late[0][0] <= host:
            events.append(Synchronize(late.popleft()[1], None, "the host asks"))
        if isinstance(event, RecordStream):
            used.add(event.storage)
            continue
        if isinstance(event, Free) and event.storage in used:
            used.discard(event.storage)
            own = _FIRST + place  # a stream of its own: it alone comes back
            late.append((collectives, own))
            events.append(RecordStream(event.storage, own))
        events.append(event)
    return dataclasses.replace(recording, events=events)
