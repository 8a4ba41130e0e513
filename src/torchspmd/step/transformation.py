"""The default transformation of a captured graph, and its dumps."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import final

from torch import fx

from torchspmd.errors import UsageError
from torchspmd.step.dumps import Dumps
from torchspmd.step.iteration import IterGraphModule


@final
class GraphModuleTransformation:
    """Turns a captured graph into the object that a program runs.

    Args:
        enable_graph_optimization: Run the default passes. None is available yet, so this
            is refused.
        enable_inductor: Compile the graph with Inductor.
        dump_graphs: Write the graphs to files: True for a folder of its own, printed in
            ``folder``, or the folder to write to.

    Attributes:
        folder: Where the dumps are; None before the first.

    Example:
        >>> transformation = GraphModuleTransformation(dump_graphs=False)
        >>> transformation.enable_inductor
        False
    """

    def __init__(
        self,
        *,
        enable_graph_optimization: bool = False,
        enable_inductor: bool = False,
        dump_graphs: bool | str | os.PathLike[str] = False,
        passes: tuple[Callable[[IterGraphModule], None], ...] = (),
    ) -> None:
        if enable_graph_optimization and not passes:
            raise UsageError(
                "GraphModuleTransformation(enable_graph_optimization=True): the default "
                "passes are not available yet. Pass your own in passes=(...)."
            )
        self.enable_graph_optimization = enable_graph_optimization
        self.enable_inductor = enable_inductor
        self.dump_graphs = dump_graphs
        self.passes = passes
        self._dumps: Dumps | None = None

    @property
    def folder(self) -> Path | None:
        """Where the dumps are; None before the first."""
        return None if self._dumps is None else self._dumps.folder

    def __call__(self, gm: fx.GraphModule) -> IterGraphModule:
        """Transform one graph."""
        if self.dump_graphs is not False and self._dumps is None:
            asked = None if self.dump_graphs is True else Path(self.dump_graphs)
            self._dumps = Dumps(asked)
        self._dump("captured", gm)
        module = IterGraphModule(gm, enable_inductor=self.enable_inductor)
        if self.enable_graph_optimization:
            for each in self.passes:
                each(module)
                self._dump(getattr(each, "__name__", "pass"), module.main_gm)
        module.finalize_setup()
        return module

    def _dump(self, name: str, gm: fx.GraphModule) -> None:
        if self._dumps is not None:
            self._dumps.write(name, gm)
