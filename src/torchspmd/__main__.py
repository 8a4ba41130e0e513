"""``python -m torchspmd``, for launchers that want a module."""

from torchspmd._cli import command

command()
