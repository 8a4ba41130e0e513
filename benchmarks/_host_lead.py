"""When memory that another stream uses comes back: as soon as the host learns it.

``record_stream`` keeps a freed block until the device is done with what that stream held.
The host asks at each allocation. Where it is ahead of the device, blocks come back late,
and the allocator takes new ones meanwhile; where it then finds the device full, it waits
for them, as it does on a GPU. Here a recording is put on two clocks, the host's and the
device's, and the allocator is told when the host would see that a block is free.
"""

import dataclasses
from collections import deque

from torchspmd.predict.operators import Pricer
from torchspmd.predict.program import price_events
from torchspmd.rehearse.recording import (
    Event,
    Free,
    Recording,
    RecordStream,
    Synchronize,
)

# Launches that CUDA queues; then the host waits. Measured by others: the first 1,000 of
# many kernels are launched at once, forums.developer.nvidia.com/t/68937.
_QUEUE = 1024
_FIRST = 1 << 40  # of the numbers of streams that no script has


def without_streams(recording: Recording) -> Recording:
    """As if the host were never ahead: blocks are there when they are freed."""
    events = [e for e in recording.events if not isinstance(e, RecordStream)]
    return dataclasses.replace(recording, events=events)


def with_late_frees(recording: Recording, pricer: Pricer) -> Recording:
    """The host learns of each block by itself that other streams are done with it.

    Collectives and kernels are taken to run one after the other: where a step waits for
    most of its communication, that is what they do.
    """
    program = price_events(recording, pricer, range(len(recording.events)))
    prices = {item.place: item for item in program.items}
    host = device = 0.0
    queue: deque[float] = deque()  # ends of what was launched
    used: set[int] = set()
    late: deque[tuple[float, int]] = deque()  # when a block is free, and its stream
    events: list[Event] = []
    for place, event in enumerate(recording.events):
        if (item := prices.get(place)) is not None:
            host += item.host
            if item.work:
                if len(queue) == _QUEUE:
                    host = max(host, queue.popleft())
                device = max(device, host) + item.work
                queue.append(device)
        if isinstance(event, Synchronize):
            host = max(host, device)
        while late and late[0][0] <= host:
            events.append(Synchronize(late.popleft()[1], None, "the host asks"))
        if isinstance(event, RecordStream):
            used.add(event.storage)
            continue
        if isinstance(event, Free) and event.storage in used:
            used.discard(event.storage)
            own = _FIRST + place  # a stream of its own: it alone comes back
            late.append((device, own))
            events.append(RecordStream(event.storage, own))
        events.append(event)
    return dataclasses.replace(recording, events=events)
