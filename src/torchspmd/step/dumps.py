"""Graphs on disk: numbered files with the rank in their names, and a manifest."""

import difflib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import fx


class Dumps:
    """Writes graphs into one folder, each with its difference to the one before."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="torchspmd-graphs-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._rows: list[dict[str, Any]] = []
        self._last: list[str] = []

    def write(self, name: str, gm: fx.GraphModule) -> None:
        """Write one graph; the first of a program has no difference."""
        if name == "captured":
            self._last = []
        sequence = len(self._rows)
        stem = f"{sequence:03d}_{name}_rank{self._rank}"
        lines = gm.print_readable(print_output=False).splitlines()
        (self.folder / f"{stem}.py.txt").write_text("\n".join(lines) + "\n")
        row = {"sequence": sequence, "name": name, "graph": f"{stem}.py.txt"}
        if self._last:
            change = difflib.unified_diff(
                self._last, lines, "before", "after", lineterm=""
            )
            (self.folder / f"{stem}.diff").write_text("\n".join(change) + "\n")
            row["difference"] = f"{stem}.diff"
        self._last = lines
        self._rows.append({**row, "nodes": len(gm.graph.nodes)})
        manifest = self.folder / f"manifest_rank{self._rank}.json"
        manifest.write_text(json.dumps(self._rows, indent=1) + "\n")
