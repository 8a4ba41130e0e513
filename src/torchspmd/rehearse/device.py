"""``torch.cuda`` of a GPU that is not there: streams, events, memory, properties."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self
from unittest import mock

import torch
import torch.cuda
from torch.utils.data._utils import pin_memory

from torchspmd import _torch
from torchspmd.comm import Group
from torchspmd.errors import UsageError
from torchspmd.rehearse.recorder import Recorder
from torchspmd.rehearse.recording import (
    EventRecord,
    EventWait,
    MarkKind,
    StreamWait,
)
from torchspmd.rehearse.values import Values
from torchspmd.step.graph.cost import CostModel

__all__ = ["Gpu", "MemoryCounter", "NoMemory", "fake_cuda"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a script may ask of its GPU.

    Attributes:
        name: As its maker calls it.
        nbytes: Its memory.
        capability: As in ``(9, 0)``.
        processors: Streaming multiprocessors.
        count: GPUs of a node.
        cost: Tells how fast it computes and sends, to those who choose by that; called
            with the groups that they communicate in, by mesh axis.
    """

    name: str
    nbytes: int
    capability: tuple[int, int]
    processors: int = 132
    count: int = 8
    cost: Callable[[Mapping[str, Group]], CostModel] = lambda axes: CostModel()


class MemoryCounter(Protocol):
    """Counts the recorded allocations as CUDA's caching allocator would."""

    def count(self) -> tuple[int, int]:
        """Allocated and reserved bytes now."""

    def peaks(self) -> tuple[int, int]:
        """The most of them since the last reset."""

    def reset_peaks(self) -> None:
        """Forget the peaks."""


class NoMemory:
    """Counts nothing, and notes that it was asked.

    Args:
        values: Takes the note.
    """

    def __init__(self, values: Values) -> None:
        self._values = values

    def count(self) -> tuple[int, int]:
        """Nothing is allocated."""
        self._values.note(
            "torch.cuda was asked for its memory: 0 bytes were given. `torchspmd predict` "
            "tells how much a script needs."
        )
        return 0, 0

    def peaks(self) -> tuple[int, int]:
        """Nothing ever was."""
        return self.count()

    def reset_peaks(self) -> None:
        """There are none."""


class _Device:
    """The state behind ``torch.cuda``."""

    def __init__(self, recorder: Recorder, shown: _torch.ShownAsCuda, gpu: Gpu) -> None:
        self.recorder, self.shown, self.gpu = recorder, shown, gpu
        self.num_events = 0
        self.stream_class = type("Stream", (_Stream,), {"owner": self})
        self.event_class = type("Event", (_Event,), {"owner": self})
        self.default = self.stream_class(number=0)
        self._current = threading.local()

    @property
    def current(self) -> "_Stream":
        """Of the thread that asks."""
        stream: _Stream = getattr(self._current, "stream", self.default)
        return stream

    def switch(self, stream: "_Stream") -> None:
        self._current.stream = stream
        self.recorder.stream = stream.number

    def append(self, event: EventRecord | EventWait | StreamWait) -> None:
        self.recorder.recording.events.append(event)


class _Stream:
    """A queue of the device: its place in the recording is a number."""

    owner: _Device
    device_type = 1

    def __init__(
        self,
        device: Any = None,
        priority: int = 0,
        *,
        number: int | None = None,
        **_: Any,
    ) -> None:
        if number is None:
            number = self.owner.recorder.new_stream("side stream")
        self.number, self.priority = number, priority
        self._outer: list[_Stream] = []

    @property
    def device(self) -> torch.device:
        return self.owner.shown.shown

    cuda_stream = stream_id = property(lambda self: self.number)
    device_index = property(lambda self: self.owner.shown.index)

    def wait_stream(self, stream: "_Stream") -> None:
        self.owner.append(StreamWait(self.number, stream.number))

    def wait_event(self, event: "_Event") -> None:
        event.wait(self)

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or self.owner.event_class()
        event.record(self)
        return event

    def synchronize(self) -> None:
        reason = "torch.cuda.Stream.synchronize"
        self.owner.recorder.synchronize(reason, stream=self.number)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return self.owner.recorder.is_capturing

    def __enter__(self) -> Self:
        self._outer.append(self.owner.current)
        self.owner.switch(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self.owner.switch(self._outer.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


class _Event:
    """A point in a stream."""

    owner: _Device

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number: int | None = None

    def record(self, stream: _Stream | None = None) -> None:
        owner = self.owner
        self.number = owner.num_events
        owner.num_events += 1
        owner.append(EventRecord(self.number, (stream or owner.current).number))

    def wait(self, stream: _Stream | None = None) -> None:
        if self.number is not None:
            waiting = stream or self.owner.current
            self.owner.append(EventWait(self.number, waiting.number))

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self.number is not None:
            reason = "torch.cuda.Event.synchronize"
            self.owner.recorder.synchronize(reason, event=self.number)

    def elapsed_time(self, end: Any) -> float:
        elapsed = self.owner.recorder.elapsed
        if elapsed is not None and self.number is not None and end.number is not None:
            return elapsed(self.number, end.number)
        self.owner.recorder.values.note(
            "torch.cuda.Event.elapsed_time was asked for: 1.0 ms was given."
        )
        return 1.0


@contextlib.contextmanager
def fake_cuda(
    recorder: Recorder, shown: _torch.ShownAsCuda, gpu: Gpu, memory: MemoryCounter
) -> Iterator[None]:
    """Let ``torch.cuda`` and ``torch.accelerator`` speak of the rehearsed GPU."""
    device = _Device(recorder, shown, gpu)
    with contextlib.ExitStack() as stack:
        for owner, names in _names(device, memory):
            for name, value in names.items():
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, value))
        # torch keeps which module a device has.
        stack.callback(torch.get_device_module.cache_clear)
        yield


def _names(
    device: _Device, memory: MemoryCounter
) -> Iterator[tuple[Any, dict[str, Any]]]:
    cuda: Any = torch.cuda
    everything = {**_facts(device), **_streams(device), **_memory(device, memory)}
    yield cuda, {**everything, **_random(), **_graphs()}
    yield cuda, _tensor_types(device.shown)
    yield cuda.memory, _memory(device, memory)
    yield cuda.random, _random()
    yield cuda.streams, {name: everything[name] for name in ("Stream", "Event")}
    ranges = ("range_push", "range_pop", "range_start", "range_end", "mark")
    yield cuda.nvtx, _effects(*ranges, result=0)
    yield torch.nn.DataParallel, {"scatter": _scatter}
    yield cuda.profiler, _effects("start", "stop", "init")
    yield cuda.nccl, {"version": lambda: (2, 28, 9), "is_available": lambda *args: True}
    # A loader pins memory in a thread of its own, where none of this is in force.
    yield pin_memory, {"pin_memory": lambda data, device=None: data}
    # Other libraries compare it with what they were built for.
    yield torch.version, {"cuda": torch.version.cuda or "12.8"}
    yield torch.profiler, {"profile": _profile_class(device)}
    yield torch, {"Generator": _generator_class(device.shown)}
    yield torch, {"set_default_tensor_type": _default_tensor_type()}
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is not None:
        replaced = _accelerator(device, everything)
        yield accelerator, replaced
        yield accelerator.memory, replaced


def _effects(*names: str, result: Any = None) -> dict[str, Callable[..., Any]]:
    # One function each: torch's compiler keeps them in a table by identity.
    return {name: (lambda *args, **kwargs: result) for name in names}


def _facts(device: _Device) -> dict[str, Any]:
    gpu, shown = device.gpu, device.shown

    def set_device(place: Any) -> None:
        if isinstance(place, str):
            place = torch.device(place)
        index = place.index if isinstance(place, torch.device) else place
        if index is not None and index >= 0:
            shown.index = index

    class DeviceContext:
        def __init__(self, place: Any) -> None:
            self._place = place

        def __enter__(self) -> None:
            self._before = shown.index
            set_device(self._place)

        def __exit__(self, *exception: object) -> None:
            shown.index = self._before

    properties = _Properties(gpu.name, gpu.nbytes, *gpu.capability, gpu.processors)
    return {
        **_effects("_lazy_init", "init", "_lazy_call", "ipc_collect"),
        **_effects("is_available", "is_initialized", "is_bf16_supported", result=True),
        **_effects("_is_in_bad_fork", "is_current_stream_capturing", result=False),
        **_effects("set_sync_debug_mode"),
        **_effects("get_sync_debug_mode", result=0),
        **_effects("utilization", "temperature", "power_draw", "clock_rate", result=0),
        "can_device_access_peer": lambda *args: True,
        "device_count": lambda: gpu.count,
        "current_device": lambda: shown.index,
        "set_device": set_device,
        "device": DeviceContext,
        "device_of": lambda tensor: DeviceContext(shown.index),
        "get_device_name": lambda place=None: gpu.name,
        "get_device_capability": lambda place=None: gpu.capability,
        "get_device_properties": lambda place=None: properties,
        "get_arch_list": lambda: [f"sm_{gpu.capability[0]}{gpu.capability[1]}"],
        "_device": DeviceContext,
    }


@dataclass(frozen=True, slots=True)
class _Properties:
    """As ``torch.cuda.get_device_properties`` gives them."""

    name: str
    total_memory: int
    major: int
    minor: int
    multi_processor_count: int
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    shared_memory_per_block: int = 49152
    shared_memory_per_multiprocessor: int = 233472
    L2_cache_size: int = 50 << 20
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    max_threads_per_block: int = 1024
    uuid: str = "00000000-0000-0000-0000-000000000000"
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    gcnArchName: str = ""  # noqa: N815  # torch's name


def _streams(device: _Device) -> dict[str, Any]:
    recorder = device.recorder

    class StreamContext:  # a class, as torch's compiler asks for its instances
        def __init__(self, stream: _Stream | None) -> None:
            self.stream = contextlib.nullcontext() if stream is None else stream

        def __enter__(self) -> None:
            self.stream.__enter__()

        def __exit__(self, *exception: object) -> None:
            self.stream.__exit__(*exception)

    return {
        "Stream": device.stream_class,
        "Event": device.event_class,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "set_stream": device.switch,
        "current_stream": lambda place=None: device.current,
        "default_stream": lambda place=None: device.default,
        "synchronize": lambda place=None: recorder.synchronize(
            "torch.cuda.synchronize"
        ),
    }


_MEMORY_STATS = (
    "num_ooms",
    "num_alloc_retries",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
    *(
        f"{name}.{pool}.{value}"
        for name in (
            *("allocation", "segment", "active", "inactive_split"),
            *("allocated_bytes", "reserved_bytes", "active_bytes"),
            *("inactive_split_bytes", "requested_bytes"),
        )
        for pool in ("all", "large_pool", "small_pool")
        for value in ("current", "peak", "allocated", "freed")
    ),
)


def _memory(device: _Device, memory: MemoryCounter) -> dict[str, Any]:
    recorder = device.recorder

    def reset(place: Any = None) -> None:
        memory.reset_peaks()
        recorder.mark(MarkKind.RESET_PEAK)

    def stats(place: Any = None) -> dict[str, Any]:
        values = dict.fromkeys(_MEMORY_STATS, 0)
        pairs = zip(
            ("allocated", "reserved"), memory.count(), memory.peaks(), strict=True
        )
        for name, now, peak in pairs:
            for pool in ("all", "large_pool", "small_pool"):
                values[f"{name}_bytes.{pool}.current"] = now
                values[f"{name}_bytes.{pool}.peak"] = peak
                values[f"active_bytes.{pool}.current"] = memory.count()[0]
                values[f"active_bytes.{pool}.peak"] = memory.peaks()[0]
        return values

    def nested_stats(place: Any = None) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for path, value in stats().items():
            *outer, name = path.split(".")
            inner = nested
            for each in outer:
                inner = inner.setdefault(each, {})
            inner[name] = value
        return nested

    def summary(*args: Any, **kwargs: Any) -> str:
        return "\n".join(f"{name}: {value}" for name, value in stats().items())

    def info(place: Any = None) -> tuple[int, int]:
        return device.gpu.nbytes - memory.count()[1], device.gpu.nbytes

    return {
        "memory_allocated": lambda place=None: memory.count()[0],
        "max_memory_allocated": lambda place=None: memory.peaks()[0],
        "memory_reserved": lambda place=None: memory.count()[1],
        "max_memory_reserved": lambda place=None: memory.peaks()[1],
        "memory_cached": lambda place=None: memory.count()[1],
        "max_memory_cached": lambda place=None: memory.peaks()[1],
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "reset_max_memory_cached": reset,
        "empty_cache": lambda: recorder.mark(MarkKind.EMPTY_CACHE),
        "memory_stats": stats,
        "memory_stats_as_nested_dict": nested_stats,
        "memory_summary": summary,
        "mem_get_info": info,
        "memory_snapshot": lambda *args, **kwargs: [],
        "device_memory_used": lambda place=None: memory.count()[1],
        "memory_usage": lambda place=None: 0,
        "list_gpu_processes": lambda place=None: "",
        "get_allocator_backend": lambda: "native",
        "get_per_process_memory_fraction": lambda place=None: 1.0,
        "_snapshot": lambda *args, **kwargs: {"segments": [], "device_traces": []},
        **_effects("set_per_process_memory_fraction", "reset_accumulated_memory_stats"),
        **_effects("reset_accumulated_host_memory_stats"),
        **_effects("reset_peak_host_memory_stats"),
        **_effects("_record_memory_history", "_dump_snapshot"),
    }


def _random() -> dict[str, Any]:
    state = torch.zeros(16, dtype=torch.uint8)
    return {
        **_effects("manual_seed", "manual_seed_all", "seed", "seed_all"),
        **_effects("set_rng_state", "set_rng_state_all"),
        "initial_seed": lambda: 0,
        "get_rng_state": lambda place=None: state.clone(),
        "get_rng_state_all": lambda: [state.clone()],
    }


def _graphs() -> dict[str, Any]:
    class CUDAGraph(torch.cuda.CUDAGraph):
        """There are no kernels to capture, and values that a replay would compute."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            raise UsageError(
                "torch.cuda.CUDAGraph: the script's cuda is the CPU, which cannot replay "
                "what it computed. Use --fake, which records captures and replays of "
                "tensors without values, or put the capture behind an option of the "
                "script that this run leaves out: a step communicates the same."
            )

    return {"CUDAGraph": CUDAGraph}


def _profile_class(device: _Device) -> type[Any]:
    class Profile:
        """A profile of a rehearsal would be one of the rehearsal: it stays empty."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            device.recorder.skip("torch.profiler.profile: nothing is profiled")

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *exception: object) -> None:
            """Nothing to write."""

        def __iter__(self) -> Iterator[Any]:
            return iter(())

        def __len__(self) -> int:
            return 0

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: [] if name == "events" else self

        def __str__(self) -> str:
            return ""

    return Profile


def _generator_class(shown: _torch.ShownAsCuda) -> type[Any]:
    plain = torch.Generator

    class OnDevice(torch.Generator):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return shown.shown

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, plain)

    class Generator(metaclass=Kind):
        """Generators of the device are the host's: no number is ever drawn."""

        def __new__(cls, device: Any = None) -> Any:
            is_cuda = device is not None and torch.device(device).type == "cuda"
            return OnDevice() if is_cuda else plain()

    return Generator


def _tensor_types(shown: _torch.ShownAsCuda) -> dict[str, type[Any]]:
    """``torch.cuda.FloatTensor`` and the like."""
    return {
        name: _tensor_type(name, shown)
        for name in vars(torch.cuda)
        if name.endswith("Tensor") and hasattr(torch, name)
    }


def _tensor_type(name: str, shown: _torch.ShownAsCuda) -> type[Any]:
    plain: Any = getattr(torch, name)

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            is_ours = _torch.is_device_tensor(value)
            return is_ours and getattr(value, "dtype", None) == plain.dtype

    class Legacy(metaclass=Kind):
        """Makes tensors as was done before they had a dtype and a device."""

        dtype = plain.dtype

        def __new__(cls, *args: Any) -> Any:
            return torch.empty(0, dtype=plain.dtype, device=shown.shown).new(*args)

    Legacy.__name__, Legacy.__module__ = name, "torch.cuda"
    return Legacy


def _default_tensor_type() -> Callable[[Any], None]:
    plain = torch.set_default_tensor_type

    def set_default_tensor_type(kind: Any) -> None:
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        if not name.startswith("torch.cuda."):
            torch.set_default_device(None)
            plain(kind)
            return
        torch.set_default_dtype(getattr(torch, name.rpartition(".")[2]).dtype)
        torch.set_default_device("cuda")

    return set_default_tensor_type


def _scatter(
    module: Any, inputs: Any, kwargs: Any, device_ids: Sequence[Any]
) -> tuple[Any, Any]:
    """To the one GPU of a process."""
    if len(device_ids) != 1:
        raise UsageError(
            "torch.nn.DataParallel computes on all GPUs of a node in one process, and a "
            "rehearsed process has one. Rehearse it with --world-size 1, where it is shown "
            "one GPU; or use DistributedDataParallel, one process for each."
        )
    place = torch.device("cuda", torch.device(device_ids[0]).index)
    return (
        _torch.map_tensors(lambda each: each.to(place), (inputs,)),
        _torch.map_tensors(lambda each: each.to(place), (kwargs,)),
    )


def _accelerator(device: _Device, cuda: dict[str, Any]) -> dict[str, Any]:
    same = {
        "device_count": "device_count",
        "device_index": "device",
        "get_memory_info": "mem_get_info",
        "current_device_index": "current_device",
        "current_device_idx": "current_device",
        "set_device_index": "set_device",
        "set_device_idx": "set_device",
    } | {
        name: name
        for name in (
            "current_stream",
            "set_stream",
            "synchronize",
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
            "reset_peak_memory_stats",
            "reset_accumulated_memory_stats",
            "memory_stats",
            "empty_cache",
        )
    }
    return {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        # Functions of their own: torch's compiler keeps them in a table by identity.
        **{name: functools.partial(cuda[other]) for name, other in same.items()},
    }
