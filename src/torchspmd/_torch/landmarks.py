"""Landmarks: functions of torch that tell what a call stack is doing."""

import weakref
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch


class Landmark:
    """Names for what a frame of torch's own code means to the frames inside it."""

    MODULE_CALL = "module call"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    MODULE_HOOK = "module backward hook"
    FSDP = "fsdp parameter group"
    DISPATCH = "dtensor dispatch"
    REDISTRIBUTE = "dtensor redistribute"
    COMPILED = "compiled region"
    GRAPH = "generated code of a graph"


# (end of the file's path, function name or None for all of the file) -> meaning
LANDMARKS: dict[tuple[str, str | None], str] = {
    ("torch/nn/modules/module.py", "_call_impl"): Landmark.MODULE_CALL,
    ("torch/autograd/graph.py", "_engine_run_backward"): Landmark.BACKWARD,
    ("torch/utils/checkpoint.py", "unpack_hook"): Landmark.RECOMPUTE,
    ("torch/utils/checkpoint.py", "recompute_fn"): Landmark.RECOMPUTE,
    ("torch/utils/checkpoint.py", "backward"): Landmark.RECOMPUTE,
    ("torch/optim/optimizer.py", "wrapper"): Landmark.OPTIMIZER,
    ("torch/nn/utils/clip_grad.py", None): Landmark.OPTIMIZER,
    ("torch/amp/grad_scaler.py", None): Landmark.OPTIMIZER,
    ("torch/utils/hooks.py", "hook"): Landmark.MODULE_HOOK,
    ("torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", None): Landmark.FSDP,
    (
        "torch/distributed/tensor/_dispatch.py",
        "redistribute_local_args",
    ): Landmark.DISPATCH,
    (
        "torch/distributed/tensor/_redistribute.py",
        "redistribute_local_tensor",
    ): Landmark.REDISTRIBUTE,
    ("torch/_functorch/_aot_autograd/runtime_wrappers.py", None): Landmark.COMPILED,
}

# Where code that torchspmd generated of a graph comes from, and the name in its globals
# under which it has the node of each line.
GENERATED_FILE = "<torchspmd step"
GENERATED_NODES = "torchspmd_nodes"

_TORCH_FOLDER = torch.__file__.removesuffix("__init__.py")


def landmark(code: CodeType) -> str | None:
    """What a function of torch means to the frames inside it; None for most."""
    path = code.co_filename.replace("\\", "/")
    if path.startswith(("<eval_with_key>", GENERATED_FILE)):
        return Landmark.GRAPH if code.co_name in ("forward", "run") else None
    if not code.co_filename.startswith(_TORCH_FOLDER):
        return None
    inside = "torch/" + path[len(_TORCH_FOLDER) :]
    return LANDMARKS.get((inside, code.co_name)) or LANDMARKS.get((inside, None))


def is_torch_code(code: CodeType) -> bool:
    """Whether a function is torch's own, or made by it."""
    name = code.co_filename
    return name.startswith((_TORCH_FOLDER, "<")) or "torchinductor" in name


def fsdp_module(local_names: dict[str, Any]) -> torch.nn.Module | None:
    """The module that an FSDP2 parameter group belongs to, from one of its frames."""
    group = local_names.get("self")
    modules = getattr(group, "modules", None)
    return modules[0] if modules else None


def hooked_module(local_names: dict[str, Any]) -> torch.nn.Module | None:
    """The module whose full backward hook runs, from the frame that calls the hook."""
    return getattr(local_names.get("self"), "module", None)


def running_node(frame: FrameType) -> torch.fx.Node | None:
    """The node that runs now, from the frame of code that was generated of a graph."""
    nodes: dict[int, torch.fx.Node] | None = frame.f_globals.get(GENERATED_NODES)
    if nodes is not None:
        return nodes.get(frame.f_lineno)
    module = frame.f_locals.get("self")
    lines = getattr(module, "_lineno_map", None)
    if not isinstance(module, torch.fx.GraphModule) or lines is None:
        return None
    known = _nodes_by_place.get(module)
    if known is None or known[0] is not frame.f_code:
        known = _nodes_by_place[module] = (frame.f_code, list(module.graph.nodes))
    place = lines.get(frame.f_lineno - module._prologue_start)
    return known[1][place] if place is not None and place < len(known[1]) else None


# The nodes of a graph module in order, for the code that was generated from them.
_nodes_by_place: weakref.WeakKeyDictionary[
    torch.fx.GraphModule, tuple[CodeType, list[torch.fx.Node]]
] = weakref.WeakKeyDictionary()


def redistribution(local_names: dict[str, Any]) -> str | None:
    """``Shard(0) -> Replicate`` from the frame of a DTensor redistribution."""
    return _change(local_names.get("current_spec"), local_names.get("target_spec"))


def implicit_redistribution(local_names: dict[str, Any]) -> tuple[str, str | None]:
    """The operator for which DTensor's dispatch redistributes an operand, and how."""
    schema = local_names.get("suggested_input_schema")
    change = _change(local_names.get("arg_spec"), local_names.get("reshard_arg_spec"))
    return str(getattr(schema, "op", "an operator")), change


def _change(before: Any, after: Any) -> str | None:
    if before is None or after is None:
        return None
    return f"{_layout(before.placements)} -> {_layout(after.placements)}"


@lru_cache(maxsize=1024)
def _layout(placements: tuple[Any, ...]) -> str:
    names = [_placement(placement) for placement in placements]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


def _placement(placement: Any) -> str:
    if placement.is_shard():
        return f"Shard({placement.dim})"
    return "Replicate" if placement.is_replicate() else "Partial"
