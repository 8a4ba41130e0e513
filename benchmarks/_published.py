"""Published training runs, as scripts of ``examples/predict``: shapes, layouts, figures.

Each source has its own file below ``published/``, or its rows here. Where a source does not
say something (dropout, which attention), what its framework did at that time is taken, and
said here. Rows with asynchronous tensor parallelism or Transformer Engine's float8 are not
here: the scripts cannot express them.
"""

import csv
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "published"
EXAMPLES = Path(__file__).parent.parent / "examples" / "predict"


class Row(NamedTuple):
    """A published figure: tokens a second and GPU, or milliseconds of a step.

    Attributes:
        name: Of the row.
        source: Framework, GPU: rows of one source share a factor.
        script: Of ``examples/predict``.
        gpu: Of the hardware file.
        network: Between its nodes.
        gpus: How many.
        layers: Of the model.
        words: Of the script, without layers and accumulation.
        tokens: Of a rank and micro-batch, over all ranks that share it; 0 where
            milliseconds are given.
        measured: The figure.
        accumulate: Micro-batches of a step.
        pp: Stages of the pipeline.
        chunks: Parts of the model on each stage.
        reserved_gib: The most of memory that was reserved; 0 where it is not told.
        model: Of those layouts that compete, for the best of them.
        has_optimizer: False where the figure is without it.
        is_whole: Whether all layers and micro-batches are rehearsed.
        rehearsed_on: The GPU that the script sees, where only prices differ.
    """

    name: str
    source: str
    script: str
    gpu: str
    network: str
    gpus: int
    layers: int
    words: str
    tokens: int
    measured: float
    accumulate: int = 1
    pp: int = 1
    chunks: int = 1
    reserved_gib: float = 0.0
    model: str = ""
    has_optimizer: bool = True
    is_whole: bool = False
    rehearsed_on: str = ""

    @property
    def seconds(self) -> float:
        """Of a step, as measured."""
        if not self.tokens:
            return self.measured / 1e3
        return self.tokens * self.accumulate / self.measured


def _read(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ----------------------------------------------------------------------------
# llm-foundry, scripts/train/benchmarking: FSDP; its submit_benchmarks.py takes
# FlashAttention 1 in Triton

# Layers, width and heads of MPT; 50368 words, GELU, tied, learned positions.
_MPT = {
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}


def mpt() -> Iterator[Row]:
    """All bf16 rows on H100."""
    for row in _read("mpt_h100.csv"):
        layers, width, heads = _MPT[row["model"]]
        batch, sequence = int(row["micro_batch"]), int(row["sequence"])
        words = f"--width {width} --heads {heads} --vocabulary 50368 --tied --flash "
        words += f"--sequence {sequence} --batch {batch}"
        words += " --recompute" if row["checkpointing"] == "True" else ""
        words += " --keep-gathered" if row["sharding"] == "SHARD_GRAD_OP" else ""
        yield Row(
            f"mpt {row['model']} {row['gpus']} GPUs, {batch} x {sequence}",
            "llm-foundry, H100",
            "gpt.py",
            str(FOLDER / "h100-triton-attention.toml"),
            "ib-ndr400",
            int(row["gpus"]),
            layers,
            words,
            batch * sequence,
            float(row["tokens_per_second_per_gpu"]),
            int(row["accumulate"]),
            rehearsed_on="h100",
        )


# ----------------------------------------------------------------------------
# torchtitan

_TITAN_H100 = ("torchtitan, H100 500 W", "llama_fsdp2.py", "h100-500w", "ib-ndr400")
_TITAN_A100 = ("torchtitan, A100", "llama_fsdp2.py", "a100", "ib-hdr200")
_SIZES = {"8b": 32, "70b": 80, "405b": 126, "llama2-13b": 40, "llama2-70b": 80}


def torchtitan() -> Iterator[Row]:
    """Its H100 tables, float8 on H200, and 64 A100 of docs/performance.md, 2024-08.

    In 2024, torch had no kernel for RMS norms and chose FlashAttention 2; the rows of batch
    1 and of TP 2 are of October 2025.
    """
    old = "--flash --composed-norms --recompute"
    new, low = "--recompute selective", "--compile --float8"
    for name, gpus, size, batch, tp, more, rate, gib in (
        ("FSDP", 8, "8b", 2, 1, f"{old} selective", 5762, 82.4),
        ("FSDP, compiled", 8, "8b", 2, 1, f"{old} selective --compile", 6667, 77.0),
        ("FSDP, compiled, float8", 8, "8b", 2, 1, f"{old} selective {low}", 8532, 76.8),
        ("FSDP 8, batch 1", 8, "8b", 1, 1, new, 7380, 47.82),
        ("FSDP 64, batch 1", 64, "8b", 1, 1, new, 5097, 31.41),
        ("FSDP 4, TP 2", 8, "8b", 1, 2, new, 5898, 35.33),
        ("FSDP 16, TP 8", 128, "405b", 2, 8, f"{old} full --compile", 109, 0),
        ("FSDP 16, TP 8, float8", 128, "405b", 2, 8, f"{old} full {low}", 177, 0),
        ("FSDP 32, TP 8, float8", 256, "70b", 16, 8, f"{old} full {low}", 829, 71.9),
    ):
        yield Row(
            f"{size} {gpus} H100, {name}",
            *_TITAN_H100,
            gpus,
            _SIZES[size],
            f"--size {size} --batch {batch} --tp {tp} {more}",
            batch * 8192 // tp,
            rate,
            reserved_gib=gib,
        )
    for cp, rate, gib in (
        (1, 3890, 83.9),
        (2, 2540, 84.2),
        (4, 1071, 84.0),
        (8, 548, 84.5),
    ):
        sequence = 32768 * cp
        yield Row(
            f"8b 8 H100, FSDP {8 // cp}, CP {cp}, compiled, float8",
            *_TITAN_H100,
            8,
            _SIZES["8b"],
            f"--size 8b --cp {cp} --sequence {sequence} {old} full {low}",
            32768,
            rate,
            reserved_gib=gib,
        )
    # Weights are gathered in 8 bits there; they have 16 here, and are not waited for.
    for gpus, rate, gib in ((32, 10938, 47.96), (64, 10753, 46.97)):
        yield Row(
            f"8b {gpus} H200, FSDP, compiled, float8",
            "torchtitan, H200",
            "llama_fsdp2.py",
            "h200",
            "ib-ndr400",
            gpus,
            _SIZES["8b"],
            f"--size 8b --batch 2 {new} --compile --float8",
            2 * 8192,
            rate,
            reserved_gib=gib,
        )
    for size, batch, sequence, recompute, rate in (
        ("8b", 1, 8192, "selective", 2973),
        ("70b", 1, 8192, "full", 331),
        ("llama2-13b", 2, 4096, "none", 2162),
        ("llama2-13b", 2, 4096, "selective", 1904),
        ("llama2-70b", 1, 4096, "selective", 355),
        ("llama2-70b", 2, 4096, "full", 353),
    ):
        words = f"--size {size} --batch {batch} --sequence {sequence}"
        yield Row(
            f"{size} 64 A100, {batch} x {sequence}, {recompute} checkpointing",
            *_TITAN_A100,
            64,
            _SIZES[size],
            f"{words} {old} {recompute}",
            batch * sequence,
            rate,
        )


def torchtitan_one_gpu() -> Iterator[Row]:
    """Forward, loss and backward of graph_trainer's graph, run operator by operator."""
    llama = "--width 2048 --heads 32 --kv-heads 8 --hidden 8192 --vocabulary 128256"
    qwen = "--width 2048 --heads 16 --kv-heads 8 --head-width 128 --hidden 6144"
    qwen += " --vocabulary 151936 --qk-norm"
    for name, words, layers, times in (
        ("llama3-1B", llama, 16, (177.622, 320.221, 330.258)),
        ("qwen3-1.7B", qwen, 28, (291.522, 524.662, 538.942)),
    ):
        for (batch, sequence), milliseconds in zip(
            ((4, 2048), (8, 2048), (4, 4096)), times, strict=True
        ):
            yield Row(
                f"{name} 1 GPU, {batch} x {sequence}",
                "torchtitan graph_trainer, H100",
                "gpt.py",
                "h100-500w",
                "ib-ndr400",
                1,
                layers,
                f"--parallel none {words} --swiglu --rotary --batch {batch} "
                f"--sequence {sequence}",
                0,
                milliseconds,
                has_optimizer=False,
            )


# ----------------------------------------------------------------------------
# NVIDIA dgxc-benchmarking v25.02: NeMo, Megatron-Core


class _Nemo(NamedTuple):
    """A model with its layout: weak scaling, by the number of GPUs."""

    name: str
    layers: int
    words: str
    micro_batches: int
    seconds: Mapping[int, float]
    pp: int = 1
    chunks: int = 1


_LLAMA = "--vocabulary 128256 --mlp swiglu --sequence 8192 --batch 1 --cp 2"
_405B = f"--width 16384 --heads 128 --kv-heads 8 --hidden 53248 {_LLAMA} --tp 8"
_NEMO = (
    _Nemo(
        "nemotron 15B {} GPUs, TP 4",
        32,
        "--width 6144 --heads 48 --kv-heads 8 --vocabulary 256000 --mlp relu2 "
        "--sequence 4096 --batch 4 --tp 4",
        4,
        {
            16: 2.812,
            32: 2.824,
            64: 2.845,
            128: 2.859,
            256: 2.852,
            512: 2.875,
            1024: 2.895,
            2048: 2.887,
        },
    ),
    _Nemo(
        "llama 8b {} GPUs, CP 2",
        32,
        f"--width 4096 --heads 32 --kv-heads 8 --hidden 14336 {_LLAMA}",
        32,
        {8: 12.78, 16: 12.99, 32: 13.00, 64: 13.00, 128: 13.16},
    ),
    _Nemo(
        "llama 70b {} GPUs, TP 4, CP 2, PP 4 x 5",
        80,
        f"--width 8192 --heads 64 --kv-heads 8 --hidden 28672 {_LLAMA} --tp 4",
        64,
        {64: 14.61, 128: 14.70, 256: 14.72, 512: 14.80, 1024: 14.86, 2048: 14.84},
        pp=4,
        chunks=5,
    ),
    _Nemo("llama 405b, 7 layers, {} GPUs, TP 8, CP 2", 7, _405B, 63, {32: 9.00}),
    _Nemo(
        "llama 405b, 21 layers, {} GPUs, TP 8, CP 2, PP 3 x 7",
        21,
        _405B,
        63,
        {96: 8.87},
        pp=3,
        chunks=7,
    ),
    _Nemo(
        "llama 405b, 42 layers, {} GPUs, TP 8, CP 2, PP 3 x 7",
        42,
        _405B,
        63,
        {192: 17.30},
        pp=3,
        chunks=7,
    ),
    _Nemo(
        "nemotron 340B {} GPUs, TP 8, PP 8 x 12",
        96,
        "--width 18432 --heads 96 --kv-heads 8 --vocabulary 256000 --mlp relu2 "
        "--sequence 4096 --batch 1 --tp 8",
        16,
        {128: 4.61, 256: 4.67, 512: 4.7, 1024: 4.73, 2048: 4.84},
        pp=8,
        chunks=12,
    ),
    _Nemo(
        "gpt3 175B {} GPUs, TP 4, PP 8 x 12",
        96,
        "--width 12288 --heads 96 --bias --sequence 2048 --batch 1 --tp 4",
        64,
        {128: 8.309, 256: 8.408, 512: 8.42, 1024: 8.453, 2048: 8.49},
        pp=8,
        chunks=12,
    ),
)


def dgxc() -> Iterator[Row]:
    """bf16: sequence parallelism beside TP, distributed optimizer, overlapped.

    Llama's attention goes round the ranks by torch's own context parallelism; Megatron's
    sends keys and values from rank to rank.
    """
    for model in _NEMO:
        words = f"{model.words} --zero --overlap --fuse-accumulation"
        words += " --sequence-parallel" if "--tp" in words else ""
        for gpus, seconds in model.seconds.items():
            yield Row(
                model.name.format(gpus),
                "NeMo, H100",
                "megatron.py",
                "h100",
                "ib-ndr400",
                gpus,
                model.layers,
                words,
                0,
                1e3 * seconds,
                model.micro_batches,
                model.pp,
                model.chunks,
            )


# ----------------------------------------------------------------------------
# vTrain: Megatron-DeepSpeed on A100, fp16, full recomputation, no fused attention, tied
# embeddings (its numbers of parameters count them once); a node has 800 Gb/s


def _vtrain(row: dict[str, str], network: str, where: str) -> Row:
    gpus, tp, dp, pp, batch, micro, width, heads, layers, sequence = (
        int(row[name])
        for name in (
            "gpus",
            "tp",
            "dp",
            "pp",
            "global_batch",
            "micro_batch",
            "width",
            "heads",
            "layers",
            "sequence",
        )
    )
    words = f"--width {width} --heads {heads} --sequence {sequence} --bias --recompute "
    words += f"--batch {micro} --tp {tp} --attention unfused --dropout 0.1 "
    words += "--half-gradients --tied"
    layout = f"tp {tp} dp {dp} pp {pp}, {micro} of {batch}"
    return Row(
        f"vTrain {width} x {layers}, {gpus} GPUs, {layout}",
        "Megatron-DeepSpeed, A100",
        "megatron.py",
        "a100",
        network,
        gpus,
        layers,
        words,
        0,
        float(row["milliseconds"]),
        batch // dp // micro,
        pp,
        model=f"vTrain {width} x {layers}, {gpus} GPUs, {where}, {batch}",
    )


def vtrain(single: int = 24, seed: int = 0) -> Iterator[Row]:
    """Its runs on 64 to 512 GPUs with up to 32 stages, and some of those on one node."""
    rows = _read("vtrain_single_node.csv")
    kinds: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        kinds.setdefault((row["gpus"], row["tp"], row["pp"]), []).append(row)
    chooser = random.Random(seed)
    strata = [chooser.sample(each, len(each)) for _, each in sorted(kinds.items())]
    chosen = [
        each[place]
        for place in range(len(rows))
        for each in strata
        if place < len(each)
    ]
    for row in chosen[:single]:
        yield _vtrain(row, "ib-hdr100", "one node")
    for row in _read("vtrain_multi_node.csv"):
        yield _vtrain(row, "ib-hdr100", "nodes")


SOURCES = {
    "mpt": mpt,
    "torchtitan": torchtitan,
    "one-gpu": torchtitan_one_gpu,
    "dgxc": dgxc,
    "vtrain": vtrain,
}

# Beginnings of the names of those rows that the docs show: sources with many are sampled
# over models, sequences, GPUs and layouts.
SAMPLE = (
    "mpt 7b 8 ",
    "mpt 7b 128",
    "mpt 1b 8 GPUs, 14",
    "mpt 1b 64",
    "mpt 13b 8 GPUs, 2 ",
    "mpt 13b 64",
    "mpt 13b 128",
    "mpt 30b 32",
    "mpt 30b 8 GPUs, 3 ",
    "mpt 70b 128",
    "mpt 3b 64",
    "mpt 3b 8 GPUs, 20",
    "mpt 760m 8 GPUs, 24",
    "mpt 760m 32",
    "nemotron 15B 16 ",
    "nemotron 15B 128 ",
    "nemotron 15B 2048 ",
    "llama 8b 8 ",
    "llama 8b 64 ",
    "llama 8b 128 ",
    "llama 70b 64 ",
    "llama 70b 1024 ",
    "llama 405b",
    "nemotron 340B 128 ",
    "vTrain 2048 x 12, 2 GPUs, tp 1 dp 2 pp 1, 1 of 32",
    "vTrain 1024 x 12, 2 GPUs, tp 1 dp 1 pp 2, 2 of 8",
    "vTrain 1024 x 16, 2 GPUs, tp 2 dp 1 pp 1, 4 of 16",
    "vTrain 2048 x 24, 4 GPUs, tp 1 dp 4 pp 1, 1 of 64",
    "vTrain 1024 x 12, 2 GPUs, tp 1 dp 1 pp 2, 2 of 4",
    "vTrain 3072 x 30, 64 GPUs, tp 1 dp 64",
    "vTrain 3072 x 30, 64 GPUs, tp 2 dp 32 pp 1, 16",
    "vTrain 3072 x 30, 64 GPUs, tp 4 dp 16 pp 1, 32",
    "vTrain 3072 x 30, 64 GPUs, tp 8 dp 8 pp 1, 8",
    "vTrain 3072 x 30, 64 GPUs, tp 16 dp 4 pp 1, 16",
    "vTrain 3072 x 30, 64 GPUs, tp 1 dp 32 pp 2, 2",
    "vTrain 6144 x 40, 256 GPUs, tp 8 dp 32 pp 1, 8",
    "vTrain 8192 x 48, 512 GPUs, tp 8 dp 32 pp 2, 8",
    # The first of two models with each number of stages.
    "vTrain 6144 x 40, 256 GPUs, tp 4 dp 32 pp 2, 8",
    "vTrain 6144 x 40, 256 GPUs, tp 8 dp 8 pp 4",
    "vTrain 6144 x 40, 256 GPUs, tp 1 dp 32 pp 8",
    "vTrain 8192 x 48, 512 GPUs, tp 4 dp 32 pp 4, 2",
    "vTrain 8192 x 48, 512 GPUs, tp 4 dp 16 pp 8, 2",
    "vTrain 8192 x 48, 512 GPUs, tp 2 dp 16 pp 16, 3",
)


def sampled(row: Row) -> bool:
    """Whether the docs show it."""
    many = ("mpt", "nemotron", "llama ", "gpt3", "vTrain")
    return not row.name.startswith(many) or row.name.startswith(SAMPLE)
