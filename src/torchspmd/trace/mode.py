"""CommDebugMode: record every communication done inside a ``with`` block."""

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch

from torchspmd import _torch
from torchspmd.comm import GLOBAL, CommEvent, Ledger, Operator, Phase, Topology, measure
from torchspmd.comm.event import is_check
from torchspmd.comm.ledger import DEFAULT_MAX_EVENTS
from torchspmd.comm.storage import write_whole
from torchspmd.errors import UsageError
from torchspmd.trace import tables
from torchspmd.trace.callsite import read_call_site, read_phase
from torchspmd.trace.intercept import listen
from torchspmd.trace.modules import ModuleInfo, ModuleTracker
from torchspmd.trace.operations import OperationLog, OperationMode
from torchspmd.trace.tables import ModuleCounts, count_modules, count_packets


class CommDebugMode:
    """Records every communication done inside it, by module, phase and mesh axis.

    It sees functional collectives, ``torch.distributed`` calls, DTensor redistribution,
    DDP, FSDP2 and regions compiled by ``torch.compile``, in forward, backward,
    recomputation and the optimizer, on real, fake and meta tensors, in every thread.
    Operators that do not communicate run as fast as without it. Entering again starts
    from zero; ledgers that were taken before stay as they are.

    Args:
        operations: Also list every operator that each module runs. This makes every
            operator slower, so it is asked for.
        sources: Also note the user's line that caused each communication.
        max_events: How many single events the ledger keeps; totals are always exact.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torchspmd.testing import fake_mesh
        >>> with fake_mesh(4, ("tp",)), CommDebugMode() as comm_mode:
        ...     dist.all_reduce(torch.ones(8))
        >>> comm_mode.get_comm_counts()[torch.ops.c10d.allreduce_]
        1
        >>> comm_mode.ledger.total(axis="tp").wire_bytes
        48
    """

    def __init__(
        self,
        *,
        operations: bool = False,
        sources: bool = False,
        max_events: int = DEFAULT_MAX_EVENTS,
    ) -> None:
        self._lists_operations = operations
        self._with_sources = sources
        self._max_events = max_events
        self._exits: ExitStack | None = None
        self._clear()

    def _clear(self) -> None:
        self.ledger = Ledger(max_events=self._max_events)
        self.operations = OperationLog()
        self._tracker = ModuleTracker()
        self._topology = Topology()

    def __enter__(self) -> Self:
        if self._exits is not None:
            raise UsageError(
                "CommDebugMode is already recording: this object was entered twice. "
                "Use a second CommDebugMode() for the inner block."
            )
        self._clear()
        with ExitStack() as exits:
            exits.callback(listen(self._record))
            exits.callback(_torch.on_graph_replay(self._note_replay))
            self._tracker.start()
            exits.callback(self._tracker.stop)
            if self._lists_operations:
                exits.enter_context(OperationMode(self.operations, self._locate))
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._lists_operations and self._tracker.compiled:
            self.ledger.note(tables.on_compiled_modules(self._tracker.compiled))
        exits, self._exits = self._exits, None
        if exits is not None:
            exits.__exit__(*exception)

    def take_ledger(self) -> Ledger:
        """What was recorded so far; recording goes on in an empty ledger."""
        ledger, self.ledger = self.ledger, Ledger(max_events=self._max_events)
        return ledger

    # --- recording --------------------------------------------------------------------

    def _record(self, operator: Operator, arguments: Mapping[str, Any]) -> None:
        site = read_call_site(self._with_sources)
        group = self._topology.group_of(arguments)
        size = measure(operator, arguments, group.size)
        event = CommEvent(
            operator.kind,
            operator.counted_as,
            size.dtype,
            size.shape,
            size.payload_bytes,
            size.wire_bytes,
            group,
            site.phase,
            site.module or self._tracker.path(site.phase, site.owner),
            implicit=site.operator is not None,
            cause=site.cause,
            source=site.source,
            compiled=site.compiled,
            check=is_check(),
        )
        self.ledger.append(event)
        for text in tables.on_event(event):
            self.ledger.note(text)
        if (
            self._tracker.in_first_ddp_step
            and tables.ON_FIRST_DDP_STEP not in self.ledger.notes
        ):
            self.ledger.note(tables.ON_FIRST_DDP_STEP)

    def _note_replay(self) -> None:
        self.ledger.note(tables.ON_REPLAY)

    def _locate(self) -> tuple[str, Phase]:
        """The module and phase of an operator, without the cost of a whole stack walk."""
        return self._tracker.locate() or (GLOBAL, read_phase())

    # --- counts -----------------------------------------------------------------------

    def get_comm_counts(self, *, checks: bool = True) -> dict[Any, int]:
        """Counts by operator packet; a packet that never ran reads 0.

        Functional collectives count under ``torch.ops.c10d_functional``, in-place ones
        under ``torch.ops.c10d``. With ``checks=False``, communication that only checks
        is left out.
        """
        return count_packets(self.ledger, checks=checks)

    def get_total_counts(self, *, checks: bool = True) -> int:
        """How many communications there were."""
        return sum(self.get_comm_counts(checks=checks).values())

    def get_comm_module_counts(self) -> dict[str, ModuleCounts]:
        """Counts by module path; a module includes those inside it.

        Each value reads both ways: ``counts["forward"][packet]`` for one phase and
        ``counts[packet]`` for all phases.
        """
        return count_modules(self.ledger, self._tracker.modules)

    @property
    def comm_counts(self) -> dict[Any, int]:
        """The same as ``get_comm_counts()``."""
        return self.get_comm_counts()

    @property
    def comm_module_counts(self) -> dict[str, ModuleCounts]:
        """The same as ``get_comm_module_counts()``."""
        return self.get_comm_module_counts()

    # --- modules ----------------------------------------------------------------------

    @property
    def modules(self) -> dict[str, ModuleInfo]:
        """Every module that ran, by path, in order of its first call."""
        return dict(self._tracker.modules)

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters of every module that ran, by module path and name."""
        return {
            path: {name: value.data for name, value in parameters.items()}
            for path, module in self._tracker.modules.items()
            if (parameters := module.parameters)
        }

    def get_sharding_info(self) -> dict[str, Any]:
        """The placements of every DTensor parameter, by ``module path.name``."""
        return {
            f"{path}.{name}": placements
            for path, module in self._tracker.modules.items()
            for name, placements in module.placements.items()
        }

    def print_parameter_info(self) -> None:
        """Print shape, dtype and layout of the parameters of every module that ran."""
        sys.stdout.write(tables.parameter_table(self._tracker.modules))

    # The original's spelling, for code that calls it.
    print_paramater_info = print_parameter_info

    def print_sharding_info(self) -> None:
        """Print the placements of every DTensor parameter."""
        for name, placements in self.get_sharding_info().items():
            sys.stdout.write(f"{name}: {placements}\n")

    # --- tables -----------------------------------------------------------------------

    def generate_module_tracing_table(self) -> str:
        """Every module that ran with its communication: own and total counts."""
        return self.generate_comm_debug_tracing_table(noise_level=0)

    def log_module_tracing_table_to_file(
        self, path: str | os.PathLike[str] = "output.txt"
    ) -> None:
        """Write ``generate_module_tracing_table()`` to a file."""
        write_whole(Path(path), self.generate_module_tracing_table())

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Modules with their communication and, on higher levels, what they ran.

        Levels: 0, counts only; 1, also module types, parameters and operators on
        DTensors; 2, also other operators; 3, also trivial ones such as views. Operators
        are recorded only if the mode was made with ``operations=True``: without it, level
        1 says so, and 2 and 3 are refused.
        """
        return tables.tracing_table(self._traced(), self._detail(noise_level))

    def log_comm_debug_tracing_table_to_file(
        self,
        file_name: str | os.PathLike[str] = "comm_mode_log.txt",
        noise_level: int = 3,
    ) -> None:
        """Write ``generate_comm_debug_tracing_table(noise_level)`` to a file."""
        write_whole(
            Path(file_name), self.generate_comm_debug_tracing_table(noise_level)
        )

    def generate_json_dump(
        self,
        file_name: str | os.PathLike[str] = "comm_mode_log.json",
        noise_level: int = 3,
    ) -> None:
        """Write the module tree with its communication and operators as JSON."""
        text = tables.tracing_json(self._traced(), self._detail(noise_level))
        write_whole(Path(file_name), text)

    def _detail(self, noise_level: int) -> tables.Detail:
        return tables.Detail.of(noise_level, are_recorded=self._lists_operations)

    def _traced(self) -> tables.Traced:
        operations = self.operations if self._lists_operations else None
        return tables.Traced(self.ledger, dict(self._tracker.modules), operations)

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"
