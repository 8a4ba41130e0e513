"""Everything that a script runs inside of while it is rehearsed."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from torchspmd import _torch
from torchspmd.rehearse.checkpoints import checkpoints_skipped
from torchspmd.rehearse.compilation import compilation_by_operator
from torchspmd.rehearse.cuda_graphs import cuda_graphs
from torchspmd.rehearse.device import Gpu, MemoryCounter, fake_cuda
from torchspmd.rehearse.kernels import cuda_kernels
from torchspmd.rehearse.place import Maker, is_called_by_torch, read_place
from torchspmd.rehearse.python_calls import PythonCalls
from torchspmd.rehearse.recorder import Recorder
from torchspmd.rehearse.recording import Recording
from torchspmd.rehearse.signals import signals_end
from torchspmd.rehearse.threads import threads_take_part
from torchspmd.rehearse.values import Values
from torchspmd.rehearse.workspaces import Processor
from torchspmd.rehearse.world import Mail, NoMail, World, fake_ranks

__all__ = ["rehearsal"]


@contextlib.contextmanager
def rehearsal(
    recording: Recording,
    world: World,
    gpu: Gpu,
    memory: MemoryCounter,
    mail: Mail | None = None,
) -> Iterator[Recorder]:
    """Inside, code for GPUs runs as one rank, without GPUs, memory and other ranks.

    Args:
        recording: Is filled with what it does.
        world: The ranks.
        gpu: What it is told of its GPU.
        memory: What it is told of memory.
        mail: Objects that other ranks send to it; None: asking for one is refused.
    """
    values = Values(recording.notes)
    processor = Processor(gpu.capability, gpu.processors)
    recorder = Recorder(recording, values, processor)

    def no_value(call: str, tensor: torch.Tensor) -> object:
        place = read_place()
        line = place.line
        if _torch.is_device_tensor(tensor):  # the host waits, whatever it is told
            recorder.synchronize(call, recorder.stream)
        if call == "__bool__":
            return values.truth(
                tensor,
                line,
                by_torch=is_called_by_torch(),
                by_optimizer=place.maker is Maker.OPTIMIZER,
            )
        return values.array(call, tensor, line)

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        recorder.record_stream(tensor, stream.number)

    def from_dtensor() -> None:
        recorder.from_dtensor = True

    mode = _torch.FakeDeviceMode(recorder.operator, from_dtensor)
    shown = _Shown(recorder.calls, no_value, record_stream)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(fake_cuda(recorder, shown, gpu, memory))
        enter(cuda_graphs(recorder))
        enter(cuda_kernels(recorder))
        enter(checkpoints_skipped(values))
        enter(signals_end(values))
        enter(compilation_by_operator(recorder, gpu.cost))
        enter(fake_ranks(world, recorder, mail or NoMail()))
        enter(_torch.shapes_apart())
        enter(_torch.fused_updates_without_values())
        enter(_torch.fake_device(mode, shown, recorder.on_resize))
        enter(_torch.files_loaded())
        enter(_torch.after_each_backward(recorder.wait_for_all))
        enter(threads_take_part(mode, shown, values))
        recorder.start()
        stack.callback(recorder.stop)
        yield recorder


class _Shown(_torch.ShownAsCuda):
    """Counts no Python calls inside of torch's functions."""

    def __init__(self, calls: PythonCalls, *args: Any) -> None:
        super().__init__(*args)
        self._calls = calls

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._calls.pause()
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            self._calls.resume()
