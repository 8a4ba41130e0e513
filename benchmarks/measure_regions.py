"""What entering compiled regions takes in a step, from steps that were measured.

    python benchmarks/measure_regions.py        # two minutes

Compiled transformers among the drawn rows (``measured/h200_drawn_*.json``), whose hosts
were timed. Host times, less what is predicted beside compiled regions, are fitted to a
constant and to times of a fused kernel, a product and attention; relative errors count.
``[host_mixed] region`` of the ``h200`` file is that constant over what a forward and a
backward region take in a loop. One row whose host waits for a full queue is left out.
"""

import json
import statistics
import sys
from collections import Counter

import torch
from _drawn_rows import drawn_rows
from _recordings import Rehearsal, record
from _rows import SCRIPT, Row
from _steps import MEASURED

from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import load_gpu
from torchspmd.predict.operators import Pricer
from torchspmd.predict.program import price_step
from torchspmd.predict.traffic import base_name
from torchspmd.rehearse.recording import Op, Recording

GPU, SEEDS = "h200", (8, 9, 10)
QUEUED = "drawn 8.16, llama"
PARTS = ("entering", "a fused kernel", "a product", "attention")
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


def rows() -> dict[Row, float]:
    """Compiled transformers, and the seconds that their hosts took."""
    found = {}
    for seed in SEEDS:
        measured = json.loads((MEASURED / f"h200_drawn_{seed}.json").read_text())
        for row in drawn_rows(seed):
            kind = row.name.rpartition(" ")[2]
            is_compiled = "--compile" in row.arguments and row.name in measured
            if is_compiled and kind not in ("moe", "resnet") and row.name != QUEUED:
                found[row] = statistics.median(measured[row.name][-1]["host"])
    return found


def parts_of(recording: Recording) -> tuple[list[float], float]:
    """How often each part is in a step, and what the host takes beside all of them."""
    figures = Figures(load_gpu(GPU))
    program = price_step(recording, Pricer(figures))
    counts: Counter[str] = Counter(entering=1)
    beside = 0.0
    for item in program.items:
        event, cost = item.event, program.costs.get(item.place)
        if not isinstance(event, Op) or event.region is None:
            beside += item.host
            continue
        name = base_name(event.name).removesuffix("_backward")
        if name in _PRODUCTS:
            counts["a product"] += 1
        elif "scaled_dot_product" in name:
            counts["attention"] += 1
        else:
            counts["a fused kernel"] += cost.kernels if cost else 1
    return [float(counts[part]) for part in PARTS], beside


def main() -> None:
    sys.path.insert(0, str(SCRIPT.parent))  # the script's own modules
    timed = rows()
    asked = {
        row: Rehearsal(SCRIPT, tuple(row.arguments.split()), GPU, 1) for row in timed
    }
    if problems := record(list(asked.values()), jobs=2):
        raise SystemExit("\n".join(f"{each}: {why}" for each, why in problems.items()))
    found = {}
    for row, seconds in timed.items():
        counts, beside = parts_of(asked[row].read())
        found[row] = (counts, seconds - beside)
    gpu = load_gpu(GPU)
    loop = sum(
        gpu.number(f"launch.compiled_{way}_region") for way in ("forward", "backward")
    )
    for title, without in (
        ("all", "none"),
        *((f"without {n}", f" {n}.") for n in SEEDS),
    ):
        some = [each for row, each in found.items() if without not in row.name]
        seconds = fit(some)
        told = ", ".join(
            f"{part} {1e6 * each:.1f} us"
            for part, each in zip(PARTS, seconds, strict=True)
        )
        print(
            f"{title}, {len(some)} steps: {told}; {seconds[0] / loop:.1f} times a loop's"
        )


def fit(steps: list[tuple[list[float], float]]) -> list[float]:
    """Seconds of each part, by least squares of relative errors."""
    left = torch.tensor([seconds for _, seconds in steps], dtype=torch.float64)
    counts = torch.tensor([each for each, _ in steps], dtype=torch.float64)
    relative = torch.linalg.lstsq(
        counts / left[:, None], torch.ones_like(left)[:, None]
    )
    solution: list[float] = relative.solution[:, 0].tolist()
    return solution


if __name__ == "__main__":
    main()
