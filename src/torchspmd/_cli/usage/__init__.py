"""How each command is used: one file a subcommand, with its texts, options and refusals.

Nothing here loads torch, which takes seconds: help and wrong use are answered at once.
"""

from types import ModuleType

from torchspmd._cli.usage import (
    calibrate,
    check,
    diff,
    doctor,
    lock,
    parity,
    plan,
    predict,
    search,
    show,
    trace,
)

# In the order of the help.
COMMANDS: tuple[ModuleType, ...] = (
    trace,
    predict,
    search,
    show,
    diff,
    plan,
    lock,
    check,
    parity,
    calibrate,
    doctor,
)
