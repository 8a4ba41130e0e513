"""One wrapper around every module call, for all who follow.

It is there while somebody follows. Global forward hooks would not do: they end before a
module's own hooks run, and those often communicate.
"""

import threading
from typing import Any, Protocol

import torch
from torch import nn

from torchspmd import _torch


class Follower(Protocol):
    """Is told when a module's call begins and ends, in the thread that makes it."""

    def enter(self, module: nn.Module) -> None:
        """A call begins."""

    def leave(self) -> None:
        """The call that began last ends, one way or the other."""


_followers: tuple[Follower, ...] = ()
_lock = threading.Lock()
_plain_call = nn.Module.__call__


def _observed_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        # Traced into a graph: what counts is the call that runs the graph.
        return _plain_call(module, *args, **kwargs)
    followers = _followers
    for follower in followers:
        follower.enter(module)
    try:
        return _plain_call(module, *args, **kwargs)
    finally:
        for follower in followers:
            follower.leave()


def follow(follower: Follower) -> None:
    """Tell a follower of every module call from now on."""
    global _followers, _plain_call  # noqa: PLW0603  # the class is process-wide too
    _torch.load_compiler()
    with _lock:
        if not _followers:
            _plain_call = nn.Module.__call__
            nn.Module.__call__ = _observed_call  # type: ignore[method-assign]
        _followers = (*_followers, follower)


def unfollow(follower: Follower) -> None:
    """Tell it no more; with the last one the wrapper goes."""
    global _followers  # noqa: PLW0603
    with _lock:
        _followers = tuple(other for other in _followers if other is not follower)
        if not _followers:
            nn.Module.__call__ = _plain_call  # type: ignore[method-assign]
