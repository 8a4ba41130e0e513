"""What a Python call of a model costs the host beside operators: ``[host_python] call``.

    python benchmarks/measure_python.py

Small models on the CPU, by hand and of Hugging Face, in forward: seconds of the whole, less
those of the same torch functions called again one after the other, over the calls that a
rehearsal counts. Told in times of an empty module's call, which ``torchspmd calibrate``
measures on every machine (``host_forward.module``). Seconds are those of the thread: other
work on the machine disturbs them less.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _harness import publish
from torch import nn
from torch.overrides import TorchFunctionMode

from torchspmd.rehearse.python_calls import PythonCalls

SMALL: dict[str, Any] = {"vocab_size": 256, "use_cache": False}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 12, "n_head": 4},
    "BertForMaskedLM": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    },
    "WhisperForConditionalGeneration": {
        "d_model": 64,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_source_positions": 8,
        "num_mel_bins": 8,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "decoder_start_token_id": 0,
    },
    "ViTForImageClassification": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "image_size": 32,
    },
}
_READS = frozenset({"__get__", "size", "dim", "numel", "stride", "is_contiguous"})
REPEATS = 30


class Noted(TorchFunctionMode):
    """Keeps every function of torch that is called, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") not in _READS:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def seconds(call: Callable[[], object]) -> float:
    """The median of several, after some that are not counted."""
    times = []
    for _ in range(REPEATS):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return statistics.median(times[REPEATS // 3 :])


def module_seconds() -> float:
    """As ``torchspmd calibrate`` measures it."""
    identity, start = nn.Identity(), torch.ones(16, 64).requires_grad_()

    def chain() -> None:
        x = start * 1.0
        for _ in range(40):
            x = identity(x)

    return seconds(chain) / 40


def by_hand() -> dict[str, Callable[[], object]]:
    layers = [each for _ in range(20) for each in (nn.Linear(64, 64), nn.ReLU())]
    perceptron, encoder = nn.Sequential(*layers), nn.TransformerEncoderLayer(64, 4, 128)
    blocks, x = nn.TransformerEncoder(encoder, 12), torch.randn(8, 2, 64)
    return {"perceptron": lambda: perceptron(x), "encoder": lambda: blocks(x)}


def of_hugging_face(name: str) -> Callable[[], object]:
    import transformers

    kinds = ("Qwen2", "GPT2", "Bert", "Whisper", "ViT")
    kind = next(each for each in kinds if name.startswith(each))
    sizes = MODELS[name] if kind == "ViT" else {**SMALL, **MODELS[name]}
    model = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**sizes))
    ids = torch.randint(1, 256, (2, 8))
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if kind == "ViT":
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    elif kind == "Whisper":
        inputs = {"input_features": torch.randn(2, 8, 16), "labels": ids}

    return lambda: model(**inputs)


def measure(name: str, forward: Callable[[], object], module: float) -> dict[str, Any]:
    def again() -> None:
        for func, args, kwargs in noted.calls:
            func(*args, **kwargs)

    with Noted() as noted:
        forward()
    counter = PythonCalls()
    counter.start()
    forward()
    counter.stop()
    calls = counter.take()
    each = (seconds(forward) - seconds(again)) / calls
    return {
        "model": name,
        "calls": calls,
        "us a call": 1e6 * each,
        "module calls": each / module,
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = module_seconds()
    models = {**by_hand(), **{name: of_hugging_face(name) for name in MODELS}}
    rows = [measure(name, forward, module) for name, forward in models.items()]
    publish("A Python call beside operators, in calls of an empty module", rows, None)
    middle = statistics.median(row["module calls"] for row in rows)
    print(f"an empty module {1e6 * module:.2f} us; median {middle:.2f} calls of it")


if __name__ == "__main__":
    main()
