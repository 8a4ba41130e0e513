"""Training runs whose sizes and choices are drawn at random, by a seed.

Who chooses rows by hand chooses what is known to work. These are drawn before anything of
them is measured: models, layers, widths, batches and lengths, precisions, optimizers,
checkpointing, clipping and ``torch.compile``, so that small runs wait for the host and
large ones for the GPU.
"""

import math
import random

from _rows import Row

COUNT = 24
_MODELS = ["gpt", "llama", "vit", "resnet", "moe"]
_MOST_FLOPS = 2e14  # of forward and backward, so that a row takes seconds
_MOST_BYTES = 60e9  # of activations, a coarse estimate


def drawn_rows(seed: int, count: int = COUNT) -> list[Row]:
    """Rows of one seed; more of them begin with the same.

    >>> drawn_rows(1, 2) == drawn_rows(1, 3)[:2]
    True
    """
    rng = random.Random(seed)
    rows: list[Row] = []
    while len(rows) < count:
        model = _MODELS[len(rows) % len(_MODELS)]
        sizes = _image_sizes(rng) if model == "resnet" else _sizes(rng, model)
        choices = _choices(rng)
        if _is_possible(model, sizes):
            told = " ".join(f"--{name} {value}" for name, value in sizes.items())
            arguments = f"--model {model} {told} {' '.join(choices)}".strip()
            rows.append(Row(f"drawn {seed}.{len(rows)}, {model}", arguments))
    return rows


def _between(rng: random.Random, least: int, most: int, step: int = 1) -> int:
    """A multiple of a step; each power of two is as likely as any other."""
    drawn = math.exp(rng.uniform(math.log(least), math.log(most)))
    return max(least, step * round(drawn / step))


def _sizes(rng: random.Random, model: str) -> dict[str, int]:
    is_image = model == "vit"
    return {
        "layers": _between(rng, 2, 24),
        # Llama's four queries share one key, and heads are 64 wide.
        "width": _between(rng, 256, 2560, 256 if model == "llama" else 64),
        "sequence": rng.choice(range(4, 25)) ** 2
        if is_image
        else _between(rng, 64, 4096, 32),
        "batch": _between(rng, 1, 128 if is_image else 32),
    }


def _image_sizes(rng: random.Random) -> dict[str, int]:
    return {
        "layers": _between(rng, 1, 23),
        "width": _between(rng, 16, 128, 16),
        "sequence": rng.choice(range(4, 21)) ** 2,
        "batch": _between(rng, 2, 256),
    }


def _choices(rng: random.Random) -> list[str]:
    found = [
        f"--precision {rng.choice(['bf16', 'autocast', 'fp32'])}",
        f"--optimizer {rng.choice(['adamw-fused', 'adamw-foreach', 'sgd'])}",
    ]
    found += ["--recompute"] if rng.random() < 0.3 else []
    found += ["--clip 1.0"] if rng.random() < 0.3 else []
    found += ["--compile"] if rng.random() < 0.3 else []
    return found


def _is_possible(model: str, sizes: dict[str, int]) -> bool:
    layers, width, batch = sizes["layers"], sizes["width"], sizes["batch"]
    if model == "resnet":
        pixels = 256 * sizes["sequence"] * batch
        flops = 3 * pixels * 1.6e5 * (width / 64) ** 2 * (10 + layers) / 16
        return flops < _MOST_FLOPS and pixels * 3e3 * width / 64 < _MOST_BYTES
    tokens = sizes["sequence"] * batch
    weights = 12 * layers * width**2 + (0 if model == "vit" else 32000 * width)
    flops = 6 * tokens * (weights + layers * width * sizes["sequence"])
    taken = tokens * (layers * width * 60 + (0 if model == "vit" else 4e5))
    return flops < _MOST_FLOPS and taken < _MOST_BYTES
