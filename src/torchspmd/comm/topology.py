"""Who takes part in a communication: from an operator's group argument to a ``Group``."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.comm.event import Group

_GROUP_ARGUMENTS = ("group_name", "process_group")
_NOBODY = Group(name="", ranks=())

# Finding the mesh behind a group costs a scan of the heap, so an answer is kept for as
# long as that mesh and that group live: group -> (mesh, axis).
_owners: weakref.WeakKeyDictionary[
    dist.ProcessGroup, tuple[weakref.ref[DeviceMesh], str]
] = weakref.WeakKeyDictionary()


class Topology:
    """Resolves groups once each; one object serves one recording."""

    def __init__(self) -> None:
        self._groups: dict[object, Group] = {}

    def group_of(self, arguments: Mapping[str, object]) -> Group:
        """The group named by an operator's arguments."""
        for name in _GROUP_ARGUMENTS:
            if name in arguments:
                return self._resolve(arguments[name])
        if "ranks" in arguments:  # the legacy functional operators
            return self._resolve(
                _torch.find_group(arguments.get("tag", ""), arguments["ranks"])
            )
        return _NOBODY

    def _resolve(self, value: Any) -> Group:
        # A name is its own key; objects are looked up by the name inside.
        known = self._groups.get(value) if isinstance(value, str) else None
        if known is None:
            process_group = _torch.resolve_group(value)
            if process_group is None:
                return _NOBODY
            known = self._groups.get(process_group.group_name)
            if known is None:
                known = describe_group(process_group)
                self._groups[process_group.group_name] = known
        return known


def describe_group(process_group: dist.ProcessGroup) -> Group:
    """A process group as a value: its name, its global ranks and its mesh axis."""
    return Group(
        name=process_group.group_name,
        ranks=tuple(dist.get_process_group_ranks(process_group)),
        axis=_axis_of(process_group),
    )


def _axis_of(process_group: dist.ProcessGroup) -> str | None:
    owner = _owners.get(process_group)
    if owner is not None and owner[0]() is not None:
        return owner[1]
    owners = {
        axis: mesh
        for mesh in _torch.live_meshes()
        if (axis := _torch.owned_axis(mesh, process_group)) is not None
    }
    if not owners:
        return _torch.described_axis(process_group)
    # Two meshes may lay differently named axes over the same ranks: show both names.
    axis = "|".join(sorted(owners))
    _owners[process_group] = (weakref.ref(next(iter(owners.values()))), axis)
    return axis
