"""A step's graph as it is iterated: the object that passes edit and a program runs."""

from collections.abc import Callable
from typing import Any, final

from torch import fx

from torchspmd.errors import UsageError


@final
class IterGraphModule:
    """A captured step that is run again and again.

    Args:
        main_gm: The graph of one iteration.
        enable_inductor: Compile it ahead when it is finished.

    Passes edit ``graph``; ``finalize_setup`` ends that. Moving work to the next iteration
    is not available yet.

    Example:
        >>> import torch
        >>> from torch import fx
        >>> double = fx.symbolic_trace(lambda x: x + x)
        >>> module = IterGraphModule(double)
        >>> module.finalize_setup()
        >>> module(torch.ones(2)).tolist()
        [2.0, 2.0]
    """

    def __init__(self, main_gm: fx.GraphModule, enable_inductor: bool = False) -> None:
        self.main_gm = main_gm
        self.enable_inductor = enable_inductor
        self._run: Callable[..., Any] | None = None

    @property
    def graph(self) -> fx.Graph:
        """The graph of one iteration."""
        return self.main_gm.graph

    def recompile(self) -> None:
        """Generate the graph's code again after an edit."""
        self.main_gm.recompile()

    def finalize_setup(self) -> None:
        """End editing; compile where asked for."""
        self.recompile()
        self._run = self.main_gm
        if self.enable_inductor:
            from torchspmd.step.backends import lower

            self._run = lower(self.main_gm)

    def forward(self, *args: Any, last_iter: bool = False) -> Any:
        """Run one iteration."""
        if self._run is None:
            raise UsageError(
                "IterGraphModule: call finalize_setup() after the passes and before the "
                "first iteration."
            )
        return self._run(*args)

    __call__ = forward

    def print_readable(self, print_output: bool = True) -> str:
        """The graph as readable Python."""
        text: str = self.main_gm.print_readable(print_output=print_output)
        return text
