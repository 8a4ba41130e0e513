"""How wrong are predictions of jobs that the model was not made with?

    python benchmarks/validate_jobs.py --measure jobs.json     # on a GPU
    python benchmarks/validate_jobs.py --measured jobs.json    # rehearsals, anywhere
    python benchmarks/validate_jobs.py --measured jobs.json --set second --markdown
    python benchmarks/validate_jobs.py --predict told.json --set third  # and no more yet
    python benchmarks/validate_jobs.py --measured jobs.json --predicted told.json

The jobs are those of ``training/jobs.py``: other models than in ``validate_time.py`` and
``validate_memory.py``, each by the command of its user.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _harness import publish
from _rows import markdown

SCRIPT = Path(__file__).parent / "training" / "jobs.py"
NAMES = {
    "first": """
        gpt2_medium gpt2_accumulated llama_checkpointed llama_compiled bert t5 mixtral
        unet convnext lstm encoder dlrm mlp
    """.split(),
    "second": """
        qwen gemma vit whisper nanogpt_compiled nanogpt_tf32 efficientnet mixer dit
        llama_lora
    """.split(),
    "third": """
        llama_fp16 neox_compiled roberta mae wav2vec gnn mamba vae clip ppo
    """.split(),
    "fourth": """
        plain_gpt vit_compiled resnet50 resnet50_checkpointed plain_llama gated_mlp
        volume_unet translator plain_bert batch_normed char_lstm gpt2_small
    """.split(),
    "fifth": """
        blocks_compiled half_checkpointed cifar resnet34_compiled resnext ddpm swin
        dense_moe gpt_graphed alibi summarizer long_context wavenet distilled many_words
        forecaster
    """.split(),
    "sixth": """
        densenet mobilenet deeplab bert_compiled gpt2_dropout llama_1b char_gpt
        conformer dcgan nerf
    """.split(),
    "seventh": """
        deit video muon retention super_resolution point_cloud dpo sorted_experts
        fourier seq2seq soft_actor wgan_gp
    """.split(),
}
_SECONDS = ("step_seconds", "host_issue_seconds", "compute_seconds")
_BYTES = ("allocated_peak_bytes", "reserved_peak_bytes", "steady_bytes")


def main() -> None:
    options = _parse()
    every = [name for names in NAMES.values() for name in names]
    names = NAMES[options.set] if options.set else every
    names = [name for name in names if not options.only or name in options.only]
    if options.measure:
        measure(names, options.measure)
        return
    if options.predict:
        told = {name: predict(name, options.gpu) for name in names}
        options.predict.write_text(json.dumps(told, indent=1) + "\n")
        return
    measured = json.loads(options.measured.read_text())
    if options.predicted:
        told = json.loads(options.predicted.read_text())
    else:
        told = {name: predict(name, options.gpu) for name in names if name in measured}
    failed = {name: told[name]["error"] for name in told if "error" in told[name]}
    rows = [
        compare(name, measured[name], told[name])
        for name in names
        if name in measured and name in told and name not in failed
    ]
    if options.markdown:
        print(*markdown(rows), sep="\n")
    else:
        publish("Jobs of users, predicted and measured", rows, None)
    print(*summary(rows), sep="\n")
    for name, why in failed.items():
        print(f"{name}: {why}")


def _parse() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--measure", type=Path, help="run them on this GPU; a JSON file")
    where.add_argument("--predict", type=Path, help="rehearse them; a JSON file")
    where.add_argument("--measured", type=Path, help="what --measure wrote")
    parser.add_argument("--predicted", type=Path, help="what --predict wrote before")
    parser.add_argument("--gpu", default="h200", help="a GPU's name or file")
    parser.add_argument("--set", choices=NAMES, help="one set of jobs")
    parser.add_argument("--only", nargs="+", help="some jobs")
    parser.add_argument("--markdown", action="store_true")
    return parser.parse_args()


def measure(names: list[str], out: Path) -> None:
    """Each in a process of its own; those that fail are named and left out."""
    found: dict[str, Any] = {}
    for name in names:
        print(f"{name}: running", file=sys.stderr)
        command = [sys.executable, str(SCRIPT), name]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            print(f"{name}: left out\n{ended.stderr[-500:]}", file=sys.stderr)
            continue
        found[name] = json.loads(ended.stdout.splitlines()[-1])
        out.write_text(json.dumps(found, indent=1) + "\n")


def predict(name: str, gpu: str) -> dict[str, Any]:
    """Seconds and bytes, or the error that was told instead."""
    print(f"{name}: rehearsing", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "prediction.json")
        command = [sys.executable, "-m", "torchspmd", "predict", str(SCRIPT)]
        command += ["--world-size", "1", "--gpu", gpu, "--json", str(out)]
        command += ["--", name, "3"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            return {
                "error": ended.stderr.splitlines()[-1].replace(str(SCRIPT), SCRIPT.name)
            }
        prediction = json.loads(out.read_text())
    memory = {name: prediction["memory"][name] for name in _BYTES}
    return {name: prediction[name] for name in _SECONDS} | {"memory": memory}


def compare(
    name: str, measured: dict[str, float], prediction: dict[str, Any]
) -> dict[str, Any]:
    """Milliseconds and MiB, and errors in percent."""
    memory, step = prediction["memory"], 1e3 * (prediction["step_seconds"] or math.nan)

    def error(predicted: float, real: float) -> float:
        return 100 * (predicted / real - 1)

    return {
        "job": name,
        "step": measured["ms"],
        "predicted": step,
        "error %": error(step, measured["ms"]),
        "allocated MiB": measured["allocated"] / 2**20,
        "allocated, error %": error(
            memory["allocated_peak_bytes"], measured["allocated"]
        ),
        "reserved, error %": error(memory["reserved_peak_bytes"], measured["reserved"]),
        "steady, error %": error(memory["steady_bytes"], measured["steady"]),
    }


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Of each column of errors: the mean, and the worst."""
    lines = []
    for column in (name for name in rows[0] if name.endswith("error %")):
        errors = [abs(row[column]) for row in rows]
        mean, middle = statistics.fmean(errors), statistics.median(errors)
        lines.append(
            f"{column}: mean {mean:.1f}, median {middle:.1f}, worst {max(errors):.1f}"
        )
    return lines


if __name__ == "__main__":
    main()
