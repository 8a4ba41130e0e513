"""Write down what the operators of a script do to the rehearsed device.

Storages are followed by weak references: one is freed when the last tensor that lies in it
goes away, as on a real device.
"""

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from itertools import takewhile
from operator import itemgetter
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.optim import Optimizer

from torchspmd import _torch
from torchspmd.comm import (
    GLOBAL,
    OWNER_KEY,
    Group,
    Kind,
    Operator,
    Owner,
    Topology,
    find_operator,
    measure,
)
from torchspmd.comm import Phase as CommPhase
from torchspmd.errors import UsageError
from torchspmd.layout.names import plain_name
from torchspmd.rehearse.assumed import assume_received
from torchspmd.rehearse.dtypes import DTYPES, refuse_dtypes
from torchspmd.rehearse.fusion import fuse_regions
from torchspmd.rehearse.place import Maker, is_called_by_torch, read_place
from torchspmd.rehearse.python_calls import Closed, PythonCalls
from torchspmd.rehearse.recording import (
    BY_TORCH,
    FROM_HOST,
    Alloc,
    Category,
    Comm,
    Event,
    EventRecord,
    Free,
    Mark,
    MarkKind,
    ModuleFacts,
    Node,
    Op,
    Phase,
    Recording,
    RecordStream,
    Site,
    StorageInfo,
    Synchronize,
    TensorSpec,
    Wait,
)
from torchspmd.rehearse.shapes import CHOOSES, SHAPES, choosing, is_told_its_size
from torchspmd.rehearse.values import KEEPS_VALUES, READS_VALUE, Values
from torchspmd.rehearse.workspaces import Processor, allocation_order, workspaces
from torchspmd.trace.modules import ModuleTracker, follow, unfollow
from torchspmd.trace.rounds import Rounds, Turn

__all__ = ["Recorder"]

_MAKERS = {
    Maker.FSDP_PARAMETER: Category.GATHERED_PARAMETER,
    Maker.FSDP_COLLECTIVE: Category.COMMUNICATION,
    Maker.DDP: Category.COMMUNICATION,
}
_COPIES = frozenset({"aten._to_copy.default", "aten.copy_.default"})
_PRODUCTS = frozenset(
    f"aten.{name}.default" for name in ("mm", "bmm", "addmm", "baddbmm", "linear")
)
_WAIT = frozenset({"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"})
_TORCHS = frozenset("aten prim prims c10d _c10d_functional c10d_functional".split())
_BEFORE_BACKWARD = frozenset({Phase.FORWARD, Phase.RECOMPUTE, Phase.OTHER})


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known of an operator before it runs."""

    name: str
    views: bool
    resizes: bool
    waits: bool
    writes: bool
    communicates: Operator | None
    arguments: tuple[str, ...]
    is_of_torch: bool
    one_dtype: tuple[int, ...]  # arguments that must have the same


class _Current(threading.local):
    """What each thread has of its own."""

    stream = 0


class Recorder:
    """Fills a recording while a script runs; between ``start`` and ``stop``.

    Args:
        recording: What is filled.
        values: What is told to a script that reads a tensor.
        processor: What CUDA kernels choose their launches by.
    """

    def __init__(
        self, recording: Recording, values: Values, processor: Processor
    ) -> None:
        self.recording = recording
        self.values = values
        self.processor = processor
        self.tracker = ModuleTracker()
        self.calls = PythonCalls()
        self._opened: list[Closed | None] = []  # by the module calls under way
        # Predicted milliseconds between two events, by their numbers.
        self.elapsed: Callable[[int, int], float] | None = None
        self._current = _Current()
        self._thread = threading.get_ident()  # that trains, as far as is known
        self.is_capturing = False  # whether a CUDA graph is being captured
        self.region: int | None = None  # of torch.compile, while one runs
        self.last_comm = -1  # number of the last communication
        self.reduction = ""  # of the collective that Python issues, as in "sum"
        # Communications of backward that C++ has issued and that nobody waited for.
        self.pending: set[int] = set()
        self._events = recording.events
        self._facts: dict[Any, _Facts] = {}
        self._chosen: set[str] = set()  # operators of libraries, by values
        self._sites: dict[tuple[str, Phase, int, str], Site] = {}
        self._numbers: dict[int, int] = {}  # of storages, by address
        self._held: dict[int, weakref.ref[Any]] = {}  # by number
        # A batch of receives gives one work for all: what reads a tensor waits for it.
        self._received: dict[int, int] = {}
        self._started: dict[int, int] = {}  # collective of a storage, by number
        self._fresh: set[int] = set()  # storages that backward may find alive
        # What attention's price depends on besides its arguments, by its result.
        self._attention_facts: dict[int, tuple[tuple[str, object], ...]] = {}
        self._part_of_scores: float | None = None
        self._is_recording = True
        self._next_storage = self._next_op = 0
        self._topology = Topology()
        self._comm_streams: dict[str, int] = {}
        self._in_optimizer = 0
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._evaluates = False  # whether a model that is trained runs in eval mode
        self._is_init, self._at_boundary = True, True
        self._had_backward = False
        self._last_end: int | None = None
        self._rounds = Rounds()
        self.from_dtensor = False  # whether a DTensor's operator is under way
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: dict[int, str] = {}  # of parameters, by storage number
        self._sources: dict[int, Category] = {}  # what casts of parameters are made of
        self._regions: list[tuple[int, int | None]] = []  # from which node on
        self._num_regions = 0
        # Of the program that a compiled step runs: in which region a node is.
        self.pieces: Mapping[fx.Node, int] = {}
        self.replays = False  # whether a program is replayed as a CUDA graph
        self._replayed: set[int] = set()  # regions that are
        self._num_programs = 0  # compiled steps that are being called
        self._owner = Owner()  # of the last node of a program
        self._piece: int | None = None  # region of the node that runs
        self._node: int | None = None  # of autograd, by its number
        self._exits: list[Callable[[], None]] = []
        self._older_meshes: list[Any] = []

    @property
    def stream(self) -> int:
        """The current one, of the thread that asks."""
        return self._current.stream

    @stream.setter
    def stream(self, number: int) -> None:
        self._current.stream = number

    @property
    def is_beside(self) -> bool:
        """Whether this is not the thread that trains, which goes on meanwhile."""
        return threading.get_ident() != self._thread

    # --- operators --------------------------------------------------------------------

    def operator(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        """Run an operator and write it down."""
        self.calls.pause()
        try:
            if self._is_recording:
                return self._operator(func, args, kwargs, run)
            facts = self._facts.get(func) or self._learn(func)
            result = self._result(facts, func, args, kwargs, run)
            self.values.after(func, facts.name, args, kwargs, result)
            return result
        finally:
            self.calls.resume()

    def _operator(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        facts = self._facts.get(func) or self._learn(func)
        if facts.one_dtype:
            refuse_dtypes(facts.name, facts.one_dtype, args)
        if facts.name in READS_VALUE:
            return self._read_value(facts.name, args[0])
        result = self._result(facts, func, args, kwargs, run)
        if result is NotImplemented:
            return result
        self._written(facts, func, args, kwargs)
        inputs = self._specs((*args, *kwargs.values()) if kwargs else args)
        site, maker = self._here()
        if self._fresh and site.phase is Phase.BACKWARD:
            self._had_backward = True
            self._mark_saved()
        if self._received:
            self._wait_for(inputs, site, self._received)
        number = self._take_number()
        place = len(self._events)
        self._events.append(None)  # type: ignore[arg-type]  # is filled in below
        outputs = self._results(facts.name, result, number, site)
        if not any(spec.device == "cuda" for spec in (*inputs, *outputs)):
            del self._events[place:]
            self.values.after(func, facts.name, args, kwargs, result)  # as of offloaded
            return result
        if facts.communicates is not None:
            arguments = {**dict(zip(facts.arguments, args, strict=False)), **kwargs}
            self._communicate(facts, arguments, place, number, (inputs, outputs), site)
            self._share_values(facts, arguments, args, result)
            return result
        if facts.waits:
            del self._events[place:]
            self._wait_for(inputs, site, self._started)
            _torch.hand_on_known(args[0], result)
            return result
        region = self._region_here(site.phase)
        op = Op(
            number,
            _kernel(facts.name, args),
            inputs,
            outputs,
            _scalars(facts.arguments, args, kwargs)
            + self._attention_choice(facts.name, inputs, outputs)
            + _precision(facts.name, inputs),
            self.stream,
            site,
            region,
            self._way(region),
            facts.views,
            0 if self.is_beside else self.calls.take(),
            self._new_node() if site.phase is Phase.BACKWARD else Node.NONE,
        )
        self.from_dtensor = False
        self._events[place] = op
        self._classify(op, place, maker)
        if not self.is_capturing:  # each replay computes others
            self.values.after(func, facts.name, args, kwargs, result)
        if facts.resizes:
            self._notice_resize(args, number, site)
        if not facts.views:
            self._use(workspaces(op, self.processor), number, site)
        return self._cross(op, args, kwargs, result)

    def _result(
        self,
        facts: _Facts,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        """What an operator gives: of a shape function, by default torch's."""
        if facts.name in SHAPES:
            run = partial(SHAPES[facts.name], *args, **kwargs)
        if facts.name in CHOOSES and _chooses(facts.name, args):
            run = self._choosing(func, facts.name, args, kwargs)
        if facts.is_of_torch:
            return run()
        return self._run_foreign(facts.name, args, run)

    def _cross(
        self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """The result of a copy between host and device, and of any other operator.

        The host waits for such a copy, unless it is told not to.
        """
        if op.name not in _COPIES or op.inputs[-1].device == op.outputs[0].device:
            return result
        to_host = op.inputs[-1].device == "cuda"
        by_torch, line = is_called_by_torch(), read_place().line
        if not (kwargs.get("non_blocking") or tuple(args[2:3]) == (True,)):
            by = BY_TORCH if by_torch else ""
            self.synchronize(op.name + (by if to_host else FROM_HOST), self.stream)
        if not to_host:
            return result
        if op.name == "aten._to_copy.default":
            return self.values.on_host(result, line, by_torch=by_torch)
        if (host := getattr(args[0], "host", None)) is not None:
            self.values.fill(host, args[1], line, by_torch=by_torch)
        return result

    def _run_foreign(
        self, name: str, args: Sequence[Any], run: Callable[[], Any]
    ) -> Any:
        """Run an operator whose shape function may ask how many values were chosen."""
        sizes = [x.size(0) for x in args if isinstance(x, torch.Tensor) and x.dim()]
        with _torch.dynamic_sizes(sizes[0] if sizes else 1) as asked:
            result = run()
        if asked:
            self._chosen.add(name)
        if name in self._chosen:  # its result may have been remembered
            self._note_choice(name)
        return result

    def _note_choice(self, name: str) -> None:
        line = read_place().line
        self.values.note(f"{line} chooses by values ({name}): all are chosen.")
        self.synchronize(name, self.stream)

    def _new_node(self) -> Node:
        """Which node of autograd begins here."""
        node, before = _torch.current_node(), self._node
        self._node = None if node is None else _torch.node_sequence(node)
        if self._node == _torch.ACCUMULATE_SEQUENCE:  # of all, with one operator each
            return Node.GRADIENT
        return Node.NONE if self._node in (None, before) else Node.OPERATOR

    def _way(self, region: int | None) -> str:
        """How the host got to an operator."""
        if self.is_beside:
            return "thread"
        if region in self._replayed:
            return "replay"
        if self._num_programs:
            compiled = "program" if self._piece is None else "compiled"
            return "graph" if self.replays else compiled
        return "dtensor" if self.from_dtensor else "eager"

    def _results(
        self, name: str, result: Any, number: int, site: Site
    ) -> tuple[TensorSpec, ...]:
        """What an operator gave, allocated in the order in which its kernel does."""
        if isinstance(result, tuple):
            is_cudnn = torch.backends.cuda.cudnn_sdp_enabled() and (
                self.processor.capability >= (9, 0)
            )
            order = allocation_order(name, len(result), is_cudnn=is_cudnn)
            self._specs((result[place] for place in order), number, site)
        return self._specs((result,), number, site)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Inside, operators are run for their values alone."""
        before, self._is_recording = self._is_recording, False
        try:
            yield
        finally:
            self._is_recording = before

    @contextmanager
    def attending(self, part: float) -> Iterator[None]:
        """Inside, attention computes a part of its scores."""
        before, self._part_of_scores = self._part_of_scores, part
        try:
            yield
        finally:
            self._part_of_scores = before

    def _attention_choice(
        self, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> tuple[tuple[str, object], ...]:
        """Whether the script rules cuDNN's attention out, and which part is computed.

        Backward does as forward did.
        """
        if not name.startswith("aten._scaled_dot_product_flash_attention"):
            return ()
        known = self._attention_facts
        if "backward" in name:
            return next((known[x.storage] for x in inputs if x.storage in known), ())
        facts: list[tuple[str, object]] = []
        if not torch.backends.cuda.cudnn_sdp_enabled():
            facts.append(("cudnn", False))
        if self._part_of_scores is not None:
            facts.append(("part_of_scores", self._part_of_scores))
        if facts:
            known[outputs[0].storage] = tuple(facts)
        return tuple(facts)

    def _read_value(self, name: str, tensor: torch.Tensor) -> object:
        """The host waits for a value; the tensor has none."""
        if _torch.is_device_tensor(tensor):
            by = BY_TORCH if is_called_by_torch() else ""  # as a GradScaler does
            self.synchronize(name + by, self.stream)
        place = read_place()
        # Whether a sharded tensor has numbers out of bounds is asked of a value.
        by_torch = place.maker is Maker.INITIALISER
        return self.values.number(tensor, place.line, by_torch=by_torch)

    def _choosing(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[], Any]:
        """What runs an operator whose result's shape depends on values."""
        run, assumed = choosing(func, name, args, kwargs)
        if is_told_its_size(name, kwargs):
            return run
        if assumed:
            line = read_place().line
            self.values.note(f"{line} chooses by values ({name}): {assumed}.")
        self.synchronize(name, self.stream)
        return run

    def _written(
        self, facts: _Facts, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if facts.writes:
            keeps = facts.name in KEEPS_VALUES
            _torch.write_known(
                func, args, kwargs, keeps=keeps, forgets=self.is_capturing
            )

    def _learn(self, func: Any) -> _Facts:
        packet = _torch.packet_name(func) if hasattr(func, "_schema") else str(func)
        name = packet.replace("::", ".") + "." + getattr(func, "_overloadname", "")
        of = find_operator(packet)
        facts = self._facts[func] = _Facts(
            name,
            bool(getattr(func, "is_view", False)) or name.startswith("aten.detach"),
            name.startswith(("aten.resize", "aten.set_")),
            packet in _WAIT,
            # Ranks hold what this one does: a broadcast changes nothing.
            hasattr(func, "_schema")
            and func._schema.is_mutable
            and (of is None or of.kind is not Kind.BROADCAST),
            of,
            _torch.argument_names(func) if hasattr(func, "_schema") else (),
            name.partition(".")[0] in _TORCHS,
            DTYPES.get(name, ()),
        )
        return facts

    def _specs(
        self, values: Iterable[Any], op: int = -1, site: Site | None = None
    ) -> tuple[TensorSpec, ...]:
        result: list[TensorSpec] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                is_sparse = value.layout is not torch.strided
                parts = _torch.plain_tensors(value) if is_sparse else [value]
                result += [self._spec(part, op, site) for part in parts]
            elif isinstance(value, list | tuple):
                result += self._specs(value, op, site)
        return tuple(result)

    def _spec(self, tensor: torch.Tensor, op: int, site: Site | None) -> TensorSpec:
        on_device = _torch.is_device_tensor(tensor)
        storage = self._number(tensor, op, site) if on_device else -1
        return TensorSpec(
            tuple(tensor.shape),
            tuple(tensor.stride()) if tensor.layout is torch.strided else (),
            _DTYPES[tensor.dtype],
            "cuda" if on_device else "cpu",
            storage,
        )

    # --- storages ---------------------------------------------------------------------

    def _number(self, tensor: torch.Tensor, op: int, site: Site | None) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        number = self._numbers.get(address)
        if number is None:
            number = self._next_storage
            self._next_storage += 1
            self._numbers[address] = number
            self._held[number] = weakref.ref(
                storage, partial(self._freed, number, address)
            )
            site = site or self._here()[0]
            info = StorageInfo(storage.nbytes(), module=site.module, site=site)
            self.recording.storages[number] = info
            self._allocate(number, info.nbytes, op, site)
        return number

    def _allocate(self, number: int, nbytes: int, op: int, site: Site) -> None:
        if nbytes:
            self._events.append(Alloc(number, nbytes, self.stream, op, site))
            if site.phase in _BEFORE_BACKWARD:
                self._fresh.add(number)

    def _freed(self, number: int, address: int, _: object) -> None:
        self._held.pop(number, None)
        if self._numbers.get(address) == number:
            del self._numbers[address]
        self._fresh.discard(number)
        self._started.pop(number, None)
        self._sources.pop(number, None)
        self._events.append(Free(number))

    def on_resize(self, storage: Any, nbytes: int) -> None:
        """Before the memory behind a storage is resized."""
        number = self._numbers.get(storage._cdata)
        if number is None:
            return
        if storage.nbytes():
            self._events.append(Free(number))
        site = self._here()[0]
        if nbytes:
            self.recording.storages[number].nbytes = nbytes
            self._allocate(number, nbytes, -1, site)

    def _notice_resize(self, args: Sequence[Any], op: int, site: Site) -> None:
        tensor = args[0]
        if not _torch.is_device_tensor(tensor):
            return
        number = self._number(tensor, op, site)
        info = self.recording.storages[number]
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes != info.nbytes:
            self._events.append(Free(number))
            info.nbytes = nbytes
            self._allocate(number, nbytes, op, site)

    def _use(self, kernels: Iterable[Sequence[int]], op: int, site: Site) -> None:
        """Memory of kernels, one after the other, for as long as they run."""
        for sizes in kernels:
            numbers = range(self._next_storage, self._next_storage + len(sizes))
            self._next_storage += len(sizes)
            for number, nbytes in zip(numbers, sizes, strict=True):
                self.recording.storages[number] = StorageInfo(
                    nbytes, name="workspace of a kernel", module=site.module, site=site
                )
                self._events.append(Alloc(number, nbytes, self.stream, op, site, True))
            self._events += map(Free, reversed(numbers))

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """A tensor is used on another stream."""
        for local in _on_device(tensor):
            self._events.append(RecordStream(self._number(local, -1, None), stream))

    # --- what storages are for --------------------------------------------------------

    def _classify(self, op: Op, place: int, maker: Maker) -> None:
        """The category of what an operator has just allocated, or of what it reads."""
        if self._num_programs and op.site.phase is Phase.OPTIMIZER:
            self._name_gradients(op.inputs)
        if self._num_programs:
            self._follow_parameters(op.inputs, op.outputs)
        new = [
            event.storage
            for event in self._events[place + 1 :]
            if isinstance(event, Alloc) and event.op == op.number
        ]
        if not new:
            return
        category = _MAKERS.get(maker)
        if (
            op.name in _COPIES
            and op.site.phase is not Phase.INIT
            and op.inputs[-1].device == "cpu"
        ):
            category = Category.INPUT
        if category is not None:
            for number in new:
                self.recording.storages[number].category = category

    def _follow_parameters(
        self, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]
    ) -> None:
        """In a compiled step, what is made of parameters alone: casts, and buckets."""
        made_of = {self._source(spec.storage) for spec in inputs if spec.storage >= 0}
        if len(made_of) != 1 or None in made_of:
            return
        (source,) = made_of
        assert source is not None
        for spec in outputs:
            info = self.recording.storages.get(spec.storage)
            if info is not None and info.category is Category.TEMPORARY:
                if source is Category.GATHERED_PARAMETER:
                    info.category = source
                self._sources[spec.storage] = source

    def _source(self, storage: int) -> Category | None:
        """Of parameters, or of gathered ones, where a storage is made of them alone."""
        category = self.recording.storages[storage].category
        if category in (Category.PARAMETER, Category.GATHERED_PARAMETER):
            return category
        return self._sources.get(storage)

    def _mark_saved(self) -> None:
        """Backward begins: what is still there of forward, autograd has kept."""
        for number in self._fresh:
            self.recording.storages[number].saved = True
        self._fresh.clear()

    def _name(
        self, tensor: torch.Tensor | None, category: Category, name: str, module: str
    ) -> None:
        for local in _on_device(tensor):
            self._name_one(local, category, name, module)

    def _name_one(
        self, local: torch.Tensor, category: Category, name: str, module: str
    ) -> None:
        number = self._number(local, -1, None)
        info = self.recording.storages[number]
        if info.category is not category:
            info.parts.clear()
        if name and module:
            info.parts[name] = (module, local.numel() * local.element_size())
        if info.category is category and info.name and name and info.name != name:
            # One storage for the gradients of a group: FSDP2's, and DDP's buckets.
            module = _common_path(info.module, module)
            name = f"{module}.*"
        info.category, info.name = category, name or info.name
        info.module = module or info.module
        if category is Category.PARAMETER:
            self._names[number] = info.name

    def _name_model(self, root: nn.Module) -> None:
        path = self.tracker.path(CommPhase.FORWARD, root)
        for name, module in root.named_modules():
            count = sum(each.numel() for each in module.parameters())
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            own = f"{path}.{plain_name(name)}" if name else path
            self.recording.modules.setdefault(own, ModuleFacts(kind, count))
        for name, parameter in root.named_parameters():
            whole = f"{path}.{plain_name(name)}"
            self._name(parameter, Category.PARAMETER, whole, whole.rpartition(".")[0])
        for name, buffer in root.named_buffers():
            whole = f"{path}.{plain_name(name)}"
            self._name(buffer, Category.BUFFER, whole, whole.rpartition(".")[0])

    def _name_of(self, parameter: torch.Tensor) -> tuple[str, str]:
        for local in _on_device(parameter):
            name = self._names.get(self._number(local, -1, None), "")
            return name, name.rpartition(".")[0]
        return "", ""

    # --- communication ----------------------------------------------------------------

    def _communicate(
        self,
        facts: _Facts,
        arguments: Mapping[str, Any],
        place: int,
        number: int,
        specs: tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]],
        site: Site,
    ) -> None:
        operator = facts.communicates
        assert operator is not None
        inputs, outputs = specs
        group = self._topology.group_of(arguments)
        size = measure(operator, arguments, group.size)
        sent = arguments.get(operator.buffer)
        peer = _peer(arguments, group.ranks)
        self.recording.groups.setdefault(group.name, group.ranks)
        gathers = self._gathers_parameters(operator, inputs)
        for event in self._events[place + 1 :]:
            if isinstance(event, Alloc):
                info = self.recording.storages[event.storage]
                info.category = (
                    Category.GATHERED_PARAMETER if gathers else Category.COMMUNICATION
                )
        self._events[place] = Comm(
            number,
            operator.kind.value,
            facts.name,
            group.name,
            group.ranks,
            group.axis,
            size.payload_bytes,
            size.dtype,
            self._specs((sent,)) if sent is not None else inputs,
            _received(outputs, inputs),
            self.stream,
            self._comm_stream(group, operator.kind.value, peer),
            bool(arguments.get("asyncOp", True)),
            peer,
            site,
        )
        if site.phase is Phase.BACKWARD and not self._num_programs:
            self.pending.add(number)
        self.last_comm = number
        for spec in outputs:
            if spec.storage >= 0:
                self._started[spec.storage] = number
        if operator.kind is Kind.RECV:
            self._received.update((spec.storage, number) for spec in inputs)

    def _share_values(
        self,
        facts: _Facts,
        arguments: Mapping[str, Any],
        args: Sequence[Any],
        result: Any,
    ) -> None:
        """What is known of values, behind a communication of them."""
        operator = facts.communicates
        assert operator is not None
        reduction = arguments.get("reduce_op")
        in_place = facts.name.startswith("c10d.")  # gives no tensor, or an argument's
        assume_received(
            operator.kind,
            reduction if isinstance(reduction, str) else self.reduction,
            list(_torch.leaves_of(torch.Tensor, arguments.get(operator.buffer))),
            list(_torch.leaves_of(torch.Tensor, args[:1] if in_place else result)),
            self._topology.group_of(arguments).size,
        )

    def _gathers_parameters(
        self, operator: Operator, inputs: Iterable[TensorSpec]
    ) -> bool:
        """Whether a compiled step gathers what is in shards."""
        return (
            self._num_programs > 0
            and operator.kind is Kind.ALL_GATHER
            and all(
                self._source(spec.storage) is Category.PARAMETER
                for spec in inputs
                if spec.storage >= 0
            )
        )

    def _comm_stream(self, group: Group, kind: str, peer: int) -> int:
        key, name = group.name, f"communicator {group.label}"
        if peer >= 0:  # sends and receives of one batch go on at the same time
            key = name = f"{kind} {'to' if kind == 'send' else 'from'} rank {peer}"
        stream = self._comm_streams.get(key)
        if stream is None:
            stream = self._comm_streams[key] = self.new_stream(name)
        return stream

    def _wait_for(
        self, inputs: tuple[TensorSpec, ...], site: Site, under_way: dict[int, int]
    ) -> None:
        for spec in inputs:
            number = under_way.pop(spec.storage, None)
            if number is not None:
                self.wait(number, site)

    def wait(self, comm: int, site: Site | None = None) -> None:
        """The current stream waits for a communication."""
        self.pending.discard(comm)
        self._events.append(Wait(comm, self.stream, site or self._here()[0]))

    def wait_for_all(self) -> None:
        """As DistributedDataParallel does at the end of backward, in C++."""
        for number in sorted(self.pending):
            self.wait(number)

    # --- streams ----------------------------------------------------------------------

    def new_stream(self, purpose: str) -> int:
        """The number of a stream that is being made."""
        number = len(self.recording.streams)
        self.recording.streams[number] = purpose
        return number

    def synchronize(
        self, reason: str, stream: int | None = None, event: int | None = None
    ) -> None:
        """The host waits for the device."""
        if self.is_capturing:
            raise UsageError(
                f"{reason.removesuffix(FROM_HOST).removesuffix(BY_TORCH)}: the host waits "
                f"for the device while a CUDA graph is captured "
                f"({self._here()[0].line or 'by torch'}), which CUDA refuses. Keep out of "
                "the capture what reads a value, synchronizes, or copies from the host "
                "without pinned memory and non_blocking=True."
            )
        if not self.is_beside:
            self._events.append(Synchronize(stream, event, reason))

    def skip(self, text: str) -> None:
        """Say, once, that something was not done."""
        if text not in self.recording.skipped:
            self.recording.skipped.append(text)

    def mark(self, kind: MarkKind) -> None:
        """Something happens to the whole device."""
        self._events.append(Mark(kind, self.recording.steps, self._here()[0].phase))

    # --- CUDA graphs ------------------------------------------------------------------

    def begin_capture(self, pool: int) -> None:
        """From now on work is captured, with memory of a pool of its own."""
        self.is_capturing = True
        self.recording.unsteady = self.recording.steps
        self._events.append(Mark(MarkKind.CAPTURE_BEGIN, pool))

    def end_capture(self) -> None:
        """Work runs again."""
        self._events.append(Mark(MarkKind.CAPTURE_END, 0))
        self.is_capturing = False

    def repeater(self) -> Callable[[Event], None]:
        """What appends work again, as of this step, with numbers of its own."""
        comms: dict[int, int] = {}

        def again(event: Event) -> None:
            match event:
                case Op():
                    event = event._replace(
                        number=self._take_number(),
                        site=self._now(event.site),
                        through="graph",
                        calls=0,
                        node=Node.NONE,
                        repeats=event.number,
                    )
                case Comm():
                    comms[event.number] = number = self._take_number()
                    event = event._replace(number=number, site=self._now(event.site))
                case Wait():
                    comm = comms.get(event.comm, event.comm)
                    event = event._replace(comm=comm, site=self._now(event.site))
            self._events.append(event)

        return again

    def _take_number(self) -> int:
        self._next_op += 1
        return self._next_op - 1

    def _now(self, site: Site) -> Site:
        key = (site.module, site.phase, self.recording.steps, site.line)
        return self._sites.setdefault(key, Site(*key))

    # --- compiled regions -------------------------------------------------------------

    def new_regions(self, count: int) -> range:
        """Numbers of regions that nothing else has."""
        self._num_regions += count
        return range(self._num_regions - count, self._num_regions)

    def begin_region(self, *, replays: bool = False) -> None:
        """A compiled function is called; whether it replays a CUDA graph."""
        (self.region,) = self.new_regions(1)
        if replays:
            self._replayed.add(self.region)
        self._regions.append((_torch.sequence_number(), self.region))

    def end_region(self) -> None:
        """The call ends; backward knows its nodes by their numbers."""
        self.region = None
        self._regions.append((_torch.sequence_number(), None))

    def mark_returned(self, results: Any) -> None:
        """What a compiled function gives to its caller."""
        for leaf in _torch.flatten_tree(results)[0]:
            for local in _on_device(leaf):
                number = self._number(local, -1, None)
                self.recording.storages[number].returned = True

    def _region_here(self, phase: Phase) -> int | None:
        if self._num_programs:
            return self._piece
        if not self._regions or phase is not Phase.BACKWARD:
            return self.region
        node = _torch.current_node()
        if node is None:
            return None
        sequence = _torch.node_sequence(node)
        place = bisect_right(self._regions, sequence, key=itemgetter(0)) - 1
        if sequence == _torch.ACCUMULATE_SEQUENCE or place < 0:
            return None
        return self._regions[place][1]

    # --- where ------------------------------------------------------------------------

    def _here(self) -> tuple[Site, Maker]:
        line, maker, node = read_place()
        located = self.tracker.locate()
        module = ""
        if self._num_programs:
            module, phase = self._owner_of(node)
        elif located is not None:
            module = "" if located[0] == GLOBAL else located[0]
            phase = Phase(located[1].value)
        else:
            phase = Phase.INIT if self._is_init else Phase.OTHER
        if self._in_optimizer or maker is Maker.OPTIMIZER:
            phase = Phase.OPTIMIZER
        key = (module, phase, self.recording.steps, line)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(*key)
        return site, maker

    def _owner_of(self, node: fx.Node | None) -> tuple[str, Phase]:
        """Whose work a compiled step does."""
        self._piece = None if node is None else self.pieces.get(node)
        if node is None:  # it makes states, or writes results into them
            return "", Phase.OTHER
        owner = node.meta.get(OWNER_KEY)
        if isinstance(owner, Owner):
            self._owner = owner
        module = "" if self._owner.module == GLOBAL else self._owner.module
        return module, Phase(self._owner.phase.value)

    # --- compiled steps ---------------------------------------------------------------

    def begin_program(self) -> None:
        """A compiled step is called."""
        self._num_programs += 1

    def end_program(self) -> None:
        """The call ends."""
        self._num_programs -= 1

    def name_program(
        self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]
    ) -> None:
        """What a new program works on."""
        for model in models:
            self._name_model(model)
        for optimizer in optimizers:
            self._name_states(optimizer)

    def _name_gradients(self, inputs: Iterable[TensorSpec]) -> None:
        for spec in inputs:
            info = self.recording.storages.get(spec.storage)
            if info is not None and info.category is Category.TEMPORARY:
                if info.site.phase is Phase.BACKWARD:
                    info.category = Category.GRADIENT

    # --- modules and optimizers -------------------------------------------------------

    def start(self) -> None:
        """Begin to follow modules and optimizers."""
        from torch.optim import optimizer

        self._older_meshes = _torch.live_meshes()
        self.tracker.start()
        follow(self)
        before = optimizer.register_optimizer_step_pre_hook(self._before_step)
        after = optimizer.register_optimizer_step_post_hook(self._after_step)
        clearing = ExitStack()
        for owner in (Optimizer, nn.Module):
            clearing.enter_context(self._notice_clearing(owner))
        clearing.enter_context(self._rounds.noticing())
        clearing.enter_context(self._autocast_in_order())
        self._exits = [
            clearing.close,
            before.remove,
            after.remove,
            self.tracker.stop,
            partial(unfollow, self),
        ]

    def _notice_clearing(self, owner: Any) -> AbstractContextManager[Any]:
        """Whether ``zero_grad`` comes before the first backward, or after a step."""
        zero_grad = owner.zero_grad

        def noticed(of: Any, *args: Any, **kwargs: Any) -> None:
            if self.recording.steps == 0 and not self._had_backward:
                self.recording.clears_first = True
            zero_grad(of, *args, **kwargs)

        return mock.patch.object(owner, "zero_grad", noticed)

    def _autocast_in_order(self) -> AbstractContextManager[Any]:
        """What autocast kept of weights is freed in the order in which it was made.

        Torch frees it by address: two recordings of a script would differ.
        """
        plain = torch.clear_autocast_cache

        def clear() -> None:
            place = len(self._events)
            plain()
            freed = self._events[place:]
            if all(isinstance(event, Free) for event in freed):
                self._events[place:] = sorted(freed)

        return mock.patch.object(torch, "clear_autocast_cache", clear)

    def stop(self) -> None:
        """Stop; nothing is left behind."""
        self.calls.stop()
        for undo in self._exits:
            undo()
        self._exits = []
        self._describe()
        if self._at_boundary and self._last_end is None:
            self.mark(MarkKind.SCRIPT_END)
        if self._num_regions:
            fuse_regions(self.recording)
        self._held.clear()  # what the script leaves behind is freed after the last event

    def _describe(self) -> None:
        """What there is of meshes and optimizers, at the end."""
        if idle := self._rounds.idle_text():
            self.values.note(idle)
        meshes = [
            mesh
            for mesh in _torch.live_meshes()
            if not any(mesh is older for older in self._older_meshes)
        ]
        for mesh in meshes:
            names = mesh.mesh_dim_names or ()
            self.recording.axes |= dict(zip(names, mesh.shape, strict=False))
        ranks = self.recording.world_size
        largest = max((mesh.size() for mesh in meshes), default=ranks)
        if largest < ranks:
            self.values.note(
                f"The largest mesh has {largest} of the {ranks} ranks: those that are left "
                "out have no part in what it is for."
            )

    def enter(self, module: nn.Module) -> None:
        """A module's call begins."""
        if self.is_beside:
            return
        in_backward = _torch.graph_task() != -1  # which computes something again
        is_eager = self.region is None and not self._num_programs
        self._opened.append(self.calls.open() if in_backward and is_eager else None)
        if in_backward or self._num_programs:
            return
        self.begin_step()
        if self.stream:
            self.recording.unsteady = self.recording.steps
        if len(self.tracker._thread.stack) > 1:
            return
        if module not in self._roots:
            self._roots.add(module)
            self._name_model(module)
        if self._is_evaluated(module):
            self._evaluates = True
            self._events.append(Mark(MarkKind.EVALUATION_BEGIN, self.recording.steps))

    def leave(self) -> None:
        """A module's call ends."""
        if self.is_beside:
            return
        opened = self._opened.pop()
        if opened is not None:
            self.calls.close(opened)
        if self._evaluates and not self._opened:
            self._evaluates = False
            self._events.append(Mark(MarkKind.EVALUATION_END, self.recording.steps))

    def _is_evaluated(self, module: nn.Module) -> bool:
        if module.training or torch.is_grad_enabled():
            return False
        trained = {
            id(parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return any(id(parameter) in trained for parameter in module.parameters())

    def begin_step(self) -> None:
        """Work of a step begins, unless it has already."""
        if self._is_init:
            self._is_init = False
            self._count_calls()
            self._events.append(Mark(MarkKind.INIT_END, 0, Phase.INIT))
        if self._at_boundary:
            self._at_boundary, self._last_end = False, None
            self._events.append(Mark(MarkKind.STEP_BEGIN, self.recording.steps))

    def _count_calls(self) -> None:
        if not self.calls.start():
            self.values.note(
                "Another profiler (sys.setprofile) is active: Python calls of the script "
                "are not counted, and a step that the host bounds is told too short. "
                "Predict without it."
            )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if _torch.is_tracing_for_compile():  # a step is captured: nothing runs
            return None
        self._in_optimizer += 1
        self._optimizers.add(optimizer)
        self.recording.can_fuse &= "fused" in optimizer.defaults
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not all(map(_torch.is_device_tensor, parameters)):
            self.values.note(
                "The optimizer updates tensors in the host's memory, as with offloaded "
                "states: the seconds of its processor are not in the prediction."
            )
        self._name_gradients_of(optimizer)
        return (
            tuple(self._outside(optimizer, each) for each in args),
            {name: self._outside(optimizer, each) for name, each in kwargs.items()},
        )

    def _outside(self, optimizer: Optimizer, value: Any) -> Any:
        """A closure that the optimizer calls is forward and backward, and no update."""
        if not callable(value):
            return value

        @wraps(value)
        def closure(*args: Any, **kwargs: Any) -> Any:
            before, self._in_optimizer = self._in_optimizer, 0
            try:
                return value(*args, **kwargs)
            finally:
                self._in_optimizer = before
                self._name_gradients_of(optimizer)

        return closure

    def _name_gradients_of(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name, module = self._name_of(parameter)
                self._name(parameter.grad, Category.GRADIENT, name, module)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if _torch.is_tracing_for_compile():
            return
        self._in_optimizer -= 1
        self._name_states(optimizer)
        self.end_step(optimizer)

    def _name_states(self, optimizer: Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            name, module = self._name_of(parameter)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    title = f"{name} {key}" if name else str(key)
                    self._name(value, Category.OPTIMIZER_STATE, title, module)

    def end_step(self, *optimizers: Optimizer) -> None:
        """Optimizers have made a step: one that follows at once moves the mark."""
        self._thread = threading.get_ident()
        turn = self._rounds.after(*optimizers)
        if turn is Turn.WITHIN:
            return
        if self._last_end is not None:
            self.recording.steps -= 1
            self._events[self._last_end] = EventRecord(-1, 0)  # means nothing
        if turn is Turn.NEW:
            self.recording.parts = self.recording.steps
        self._last_end = len(self._events)
        if self.stream or any(map(_torch.has_first_buckets, self._roots)):
            self.recording.unsteady = self.recording.steps
        self._events.append(Mark(MarkKind.STEP_END, self.recording.steps))
        self.recording.steps += 1
        self._at_boundary = True


def _on_device(tensor: Any) -> Iterator[torch.Tensor]:
    """What a tensor, or a wrapper of some, holds on this rank's device."""
    return filter(_torch.is_device_tensor, _torch.plain_tensors(tensor))


def _kernel(name: str, args: Sequence[Any]) -> str:
    """An operator on sparse tensors is no other one's: it is priced by its bytes."""
    is_sparse = any(isinstance(x, torch.Tensor) and x.is_sparse for x in args)
    return name.replace("aten.", "sparse.", 1) if is_sparse else name


def _precision(
    name: str, inputs: Sequence[TensorSpec]
) -> tuple[tuple[str, object], ...]:
    """Whether a product of 32 bits may be computed in TF32, as the script has set it."""
    if not inputs or inputs[-1].dtype not in ("float32", "complex64"):
        return ()
    if name in _PRODUCTS:
        return (("allow_tf32", _torch.allows_tf32("matmul")),)
    if name.startswith("aten.convolution"):
        return (("allow_tf32", _torch.allows_tf32("convolution")),)
    return ()


def _chooses(name: str, args: Sequence[Any]) -> bool:
    """Whether the shape of the result depends on values."""
    if name != "aten.index.Tensor":
        return True
    masks = (torch.bool, torch.uint8)
    return any(index is not None and index.dtype in masks for index in args[1])


def _common_path(one: str, other: str) -> str:
    """The innermost module around both."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return ".".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _received(
    outputs: tuple[TensorSpec, ...], inputs: tuple[TensorSpec, ...]
) -> tuple[TensorSpec, ...]:
    return outputs or inputs


def _peer(arguments: Mapping[str, Any], ranks: tuple[int, ...]) -> int:
    """The global rank of a send or receive: the operator is told its place in the group."""
    for name in ("dst", "dstRank", "src", "srcRank"):
        if isinstance(arguments.get(name), int):
            return ranks[int(arguments[name])]
    return -1


def _scalars(
    names: tuple[str, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, object], ...]:
    found = [
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in (*zip(names, args, strict=False), *kwargs.items())
        if isinstance(value, int | float | str)
        or (isinstance(value, list) and value and isinstance(value[0], int | bool))
    ]
    return tuple(found)


class _DtypeNames(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_DTYPES = _DtypeNames()
