"""torch's distributed code and libraries, where it would read the values of tensors."""

import builtins
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from torchspmd.errors import UsageError


@contextlib.contextmanager
def shapes_apart() -> Iterator[None]:
    """DTensor asks for shapes in a mode of its own, and not in the one that is in force.

    It runs operators on fake tensors of the whole size to find the shapes of results.
    """
    from torch.distributed.tensor import _sharding_prop

    if not hasattr(_sharding_prop, "detect_fake_mode"):
        yield
        return
    mode = _ShapeMode()
    with mock.patch.object(_sharding_prop, "detect_fake_mode", lambda: mode):
        yield


class _ShapeMode(FakeTensorMode):
    """In-place operators give what they are given.

    Those of random numbers, for one, ask for a generator in their shape functions.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, OpOverload) and _keeps_its_shape(func):
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _keeps_its_shape(operator: OpOverload) -> bool:
    schema = operator._schema
    return (
        schema.name.endswith("_")
        and torch.Tag.inplace_view not in operator.tags
        and len(schema.returns) == 1
        and bool(schema.arguments)
        and schema.arguments[0].alias_info is not None
        and schema.arguments[0].alias_info.is_write
    )


@contextlib.contextmanager
def dynamic_sizes(size: int) -> Iterator[list[int]]:
    """Give shape functions this size where they ask for one that depends on values.

    Gives:
        The answers, as many as were asked for.
    """
    from torch._library import fake_impl

    answers: list[int] = []

    def answer(context: Any, *, min: int = 0, max: int | None = None) -> int:
        answers.append(size if max is None else builtins.min(size, max))
        return answers[-1]

    with mock.patch.object(fake_impl.FakeImplCtx, "new_dynamic_size", answer):
        yield answers


class _Chunks:
    """The chunks of a tensor, each made when it is asked for."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._step = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, place: int) -> torch.Tensor:
        size = self._tensor.size(self._dim)
        start = place * self._step
        if start >= size:
            return self._tensor.new_empty(0) if place else self._tensor
        return self._tensor.narrow(self._dim, start, min(self._step, size - start))


@contextlib.contextmanager
def own_chunks_only() -> Iterator[None]:
    """``fully_shard`` makes only the chunks that it looks at.

    It splits each parameter into as many chunks as there are ranks, and takes one.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with mock.patch.object(_fsdp_param, "_chunk_with_empty", _Chunks):
        yield


@contextlib.contextmanager
def optimizer_states_on_all_ranks() -> Iterator[None]:
    """``FSDP.optim_state_dict`` knows which states there are without asking other ranks.

    Rank 0 would say it or, with ``use_orig_params``, all ranks together: each has states
    for the parameters that it holds a part of.
    """
    from torch.distributed.fsdp import _optim_utils

    plain: Any = _optim_utils._map_param_key_to_optim_keys

    def keys(
        optim_state_dict: Any,
        group: Any,
        param_key_to_param: Any,
        param_to_fqns: Any,
        fqn_to_fsdp_param_info: Mapping[str, Any],
        merge_keys: bool = False,
    ) -> tuple[list[Any], Any]:
        known, local = plain(
            optim_state_dict,
            group,
            param_key_to_param,
            param_to_fqns,
            fqn_to_fsdp_param_info,
            merge_keys=True,  # what this rank has itself
        )
        held_elsewhere = (
            _optim_utils._OptimStateKey((name,), is_fsdp_managed=True)
            for name, info in fqn_to_fsdp_param_info.items()
            if merge_keys and info.param_requires_grad[info.param_indices[name]]
        )
        return sorted({*known, *held_elsewhere}), local

    plain_send: Any = _optim_utils._broadcast_processed_state

    def send(fsdp_state: Any, optim_state: Any, group: Any) -> Any:
        rank = torch.distributed.get_rank(group)
        if rank:
            raise UsageError(
                "FSDP.optim_state_dict_to_load: with rank0_only=True rank 0 sends the "
                f"states, and only rank {rank} is rehearsed here. Rehearse rank 0, or load "
                "the file on every rank, with rank0_only=False."
            )
        return plain_send(fsdp_state, optim_state, group)

    with (
        mock.patch.object(_optim_utils, "_map_param_key_to_optim_keys", keys),
        mock.patch.object(_optim_utils, "_broadcast_processed_state", send),
    ):
        yield


@contextlib.contextmanager
def stages_like_this_one() -> Iterator[None]:
    """Other stages know their shapes where this one does; gradients are like the outputs.

    What the stage before it sends can be found by rehearsing that one. The stage behind it
    would have to wait for this one first.
    """
    from torch.distributed.pipelining import stage as stages

    kind: Any = stages.PipelineStage
    mode: Any = getattr(stages, "InferenceMode", None)
    answer: Any = getattr(stages, "_StageBackwardMeta", None)
    if answer is None:  # torch 2.11 does not vote, and asks for no gradients
        yield
        return
    plain_receive, plain_vote = kind._recv_meta, kind._warmup_forward_vote
    plain_result = kind._warmup_backward_result
    votes: dict[int, bool] = {}

    def receive(stage: Any, src_stage: int) -> Any:
        if src_stage > stage.stage_index:
            return answer(backward_metas=stage._stage_meta.outputs)
        return plain_receive(stage, src_stage)

    def vote(stage: Any, has_backward: bool, received_acc: Any = None) -> Any:
        asks = mode.needs_dynamic(stage._user_meta, has_backward)
        votes[stage.stage_index] = not asks
        return plain_vote(stage, has_backward, received_acc)

    def result(stage: Any, received_result: Any = None) -> Any:
        plain_result(stage, received_result)
        return torch.tensor([int(votes[stage.stage_index])], dtype=torch.int32)

    with (
        mock.patch.object(kind, "_recv_meta", receive),
        mock.patch.object(kind, "_warmup_forward_vote", vote),
        mock.patch.object(kind, "_warmup_backward_result", result),
    ):
        yield
