"""Training jobs as their users write them: ``python jobs.py NAME [STEPS]``.

Models of other kinds than those of ``train.py``, from Hugging Face's configurations or by
hand, with other optimizers, precisions and layouts. Each prints one line of JSON: the
milliseconds of a step, and the memory that ``torch.cuda`` counted. Nothing here knows of
torchspmd; ``../validate_jobs.py`` predicts the same commands.
"""

import contextlib
import copy
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from job_models import (
    ActorCritic,
    AlibiGpt,
    AttendingGru,
    AudioEncoder,
    BasicBlock,
    Bert,
    CappedGpt,
    CharLstm,
    Classifier,
    Conformer,
    ConvNext,
    Ddpm,
    DeepLab,
    Deit,
    DenseNet,
    Distilled,
    DiT,
    Dlrm,
    DropoutGpt,
    EfficientNet,
    ExpertGpt,
    Forecaster,
    FourierOperator,
    GatedMlp,
    GraphNetwork,
    GroupedBottleneck,
    GroupedGpt,
    HalfCheckpointedGpt,
    HalvesLlama,
    ImageVae,
    LongGpt,
    Lora,
    Lstm,
    Mamba,
    Mixer,
    MobileNetV3,
    NanoGpt,
    Nerf,
    PlainBert,
    PlainGpt,
    PlainLlama,
    PlainVit,
    PointCloudNet,
    ResNet50,
    RetNet,
    SoftActor,
    SortedExpertsGpt,
    SquaredGpt,
    Summarizer,
    SuperResolution,
    Swin,
    Translator,
    TwinCritic,
    UNet,
    VideoTransformer,
    VolumeUNet,
    WaveNet,
    WordyGpt,
    cifar_resnet18,
    dcgan_start,
    discriminator,
    generator,
    image_net,
    plain_critic,
    wide_mlp,
)
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

CUDA = torch.device("cuda")
Step = Callable[[], None]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1)


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


@dataclass
class Job:
    """A model, its loss, and how it is trained."""

    model: nn.Module
    loss: Callable[[], torch.Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = fused_adamw
    autocast: torch.dtype | None = None
    scaled: bool = False
    clips: bool = True
    clears_first: bool = False
    micro_batches: int = 1
    averaged: bool = False
    ema: float | None = None
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    logs: bool = False


def tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape, device=CUDA)


def images(count: int, *shape: int, last: bool = False) -> torch.Tensor:
    order = torch.channels_last if last else torch.contiguous_format
    return torch.randn(count, *shape, device=CUDA).to(memory_format=order)


def hugging_face(kind: str, head: str, **configuration: Any) -> Any:
    import transformers

    made = getattr(transformers, f"{kind}Config")(**configuration)
    return getattr(transformers, f"{kind}{head}")(made)


def language_model(
    kind: str,
    batch: int,
    length: int,
    dtype: torch.dtype | None = torch.bfloat16,
    **configuration: Any,
) -> Job:
    """Of Hugging Face, in bfloat16 or under autocast."""
    model = hugging_face(kind, "ForCausalLM", use_cache=False, **configuration)
    model = model.to(CUDA) if dtype is None else model.to(CUDA, dtype)
    ids = tokens(configuration["vocab_size"], batch, length)
    autocast = torch.bfloat16 if dtype is None else None
    return Job(model, lambda: model(input_ids=ids, labels=ids).loss, autocast=autocast)


# ----------------------------------------------------------------------------
# The first set: what the model of time was mended by.


def gpt2(width: int = 768, layers: int = 12, heads: int = 12, length: int = 512) -> Job:
    model = hugging_face(
        "GPT2", "LMHeadModel", n_embd=width, n_layer=layers, n_head=heads
    ).to(CUDA)
    ids = tokens(50257, 8, length)
    return Job(
        model,
        lambda: model(input_ids=ids, labels=ids).loss,
        adamw,
        torch.bfloat16,
        clears_first=True,
    )


def gpt2_medium() -> Job:
    return gpt2(1024, 24, 16, 1024)


def gpt2_accumulated() -> Job:
    job = gpt2()
    job.micro_batches = 4
    return job


def llama_checkpointed() -> Job:
    job = language_model(
        "Llama",
        4,
        2048,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
    )
    job.model.gradient_checkpointing_enable()
    job.model.train()
    job.clears_first = True
    return job


def llama_compiled() -> Job:
    job = language_model(
        "Llama",
        8,
        1024,
        None,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=50304,
    )
    compiled, ids = torch.compile(job.model), tokens(50304, 8, 1024)
    job.loss = lambda: compiled(input_ids=ids, labels=ids).loss
    job.clears_first = True
    return job


def bert() -> Job:
    model, ids = hugging_face("Bert", "ForMaskedLM").to(CUDA), tokens(30522, 32, 512)
    seen = torch.ones_like(ids)
    return Job(
        model,
        lambda: model(input_ids=ids, attention_mask=seen, labels=ids).loss,
        adamw,
        torch.float16,
        scaled=True,
        clears_first=True,
    )


def t5() -> Job:
    torch.backends.cuda.matmul.allow_tf32 = True
    model = hugging_face(
        "T5",
        "ForConditionalGeneration",
        d_model=512,
        d_ff=2048,
        num_layers=6,
        num_heads=8,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    ).to(CUDA)
    ids, labels = tokens(32000, 16, 512), tokens(32000, 16, 128)
    return Job(
        model,
        lambda: model(input_ids=ids, labels=labels).loss,
        adamw,
        clears_first=True,
    )


def mixtral() -> Job:
    job = language_model(
        "Mixtral",
        4,
        1024,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_local_experts=8,
        vocab_size=32000,
    )
    job.optimizer, job.clears_first = adamw, True
    return job


def unet() -> Job:
    model = UNet().to(CUDA).to(memory_format=torch.channels_last)
    x = images(32, 4, 64, 64, last=True)
    return Job(
        model,
        lambda: F.mse_loss(model(x).float(), x),
        adamw,
        torch.bfloat16,
        clears_first=True,
    )


def convnext() -> Job:
    model, x, y = ConvNext().to(CUDA), images(128, 3, 224, 224), tokens(1000, 128)
    return Job(
        model,
        lambda: F.cross_entropy(model(x).float(), y, label_smoothing=0.1),
        adamw,
        torch.bfloat16,
        clears_first=True,
    )


def lstm() -> Job:
    torch.backends.cuda.matmul.allow_tf32 = True
    model, ids = Lstm().to(CUDA), tokens(30000, 64, 128)
    return Job(
        model,
        lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
        lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
        clears_first=True,
    )


def encoder() -> Job:
    model, x, y = Classifier().to(CUDA), images(64, 3, 224, 224), tokens(1000, 64)
    return Job(
        model,
        lambda: F.cross_entropy(model(x).float(), y),
        adamw,
        torch.bfloat16,
        clears_first=True,
    )


def dlrm() -> Job:
    torch.backends.cuda.matmul.allow_tf32 = True
    model, dense = Dlrm().to(CUDA), torch.randn(8192, 13, device=CUDA)
    ids, y = tokens(200_000, 26, 8192, 4), torch.rand(8192, device=CUDA)
    return Job(
        model,
        lambda: F.binary_cross_entropy_with_logits(model(dense, ids), y),
        lambda each: torch.optim.Adagrad(each, lr=0.01),
        clears_first=True,
    )


def mlp() -> Job:
    torch.backends.cuda.matmul.allow_tf32 = True
    layers = [m for _ in range(20) for m in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10)).to(CUDA)
    x, y = torch.randn(512, 256, device=CUDA), tokens(10, 512)
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y),
        lambda each: torch.optim.Adam(each, lr=1e-3),
        clears_first=True,
    )


# ----------------------------------------------------------------------------
# The second set: predicted before it was measured.


def qwen() -> Job:
    return language_model(
        "Qwen2",
        4,
        1024,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    )


def gemma() -> Job:
    return language_model(
        "Gemma2",
        4,
        1024,
        hidden_size=1152,
        intermediate_size=4608,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=64000,
    )


def vit() -> Job:
    model = hugging_face("ViT", "ForImageClassification", num_labels=1000).to(CUDA)
    x, y = images(128, 3, 224, 224), tokens(1000, 128)
    return Job(
        model,
        lambda: model(pixel_values=x, labels=y).loss,
        autocast=torch.bfloat16,
    )


def whisper() -> Job:
    model = hugging_face(
        "Whisper",
        "ForConditionalGeneration",
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        use_cache=False,
    ).to(CUDA)
    x, y = torch.randn(16, 80, 3000, device=CUDA), tokens(50000, 16, 128)
    return Job(
        model,
        lambda: model(input_features=x, labels=y).loss,
        autocast=torch.bfloat16,
    )


def nanogpt_compiled() -> Job:
    model = NanoGpt().to(CUDA)
    compiled = torch.compile(model)
    x, y = tokens(50304, 16, 1024), tokens(50304, 16, 1024)
    return Job(model, lambda: compiled(x, y), autocast=torch.bfloat16)


def nanogpt_tf32() -> Job:
    torch.set_float32_matmul_precision("high")
    model = NanoGpt(width=1024, depth=8, heads=16).to(CUDA)
    x, y = tokens(50304, 8, 512), tokens(50304, 8, 512)
    return Job(
        model,
        lambda: model(x, y),
        lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
    )


def efficientnet() -> Job:
    model = EfficientNet().to(CUDA, memory_format=torch.channels_last)
    x, y = images(128, 3, 224, 224, last=True), tokens(1000, 128)
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y),
        autocast=torch.float16,
        scaled=True,
        clips=False,
    )


def mixer() -> Job:
    model, x, y = Mixer().to(CUDA), images(128, 3, 224, 224), tokens(1000, 128)
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y),
        autocast=torch.bfloat16,
        clips=False,
    )


def dit() -> Job:
    model = DiT().to(CUDA)
    x, t = torch.randn(32, 1024, 16, device=CUDA), torch.randn(32, 256, device=CUDA)
    return Job(
        model,
        lambda: F.mse_loss(model(x, t), x),
        autocast=torch.bfloat16,
        averaged=True,
    )


def llama_lora() -> Job:
    model = hugging_face(
        "Llama",
        "ForCausalLM",
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        use_cache=False,
    ).requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            adapted = Lora(getattr(layer.self_attn, name))
            setattr(layer.self_attn, name, adapted)
    model, ids = model.to(CUDA, torch.bfloat16), tokens(32000, 4, 2048)
    return Job(model, lambda: model(input_ids=ids, labels=ids).loss)


# ----------------------------------------------------------------------------
# The third set: predicted before it was measured.


def llama_fp16() -> Job:
    with CUDA:
        model = hugging_face(
            "Llama",
            "ForCausalLM",
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=32000,
            use_cache=False,
        )
    ids = tokens(32000, 4, 1024)
    return Job(
        model,
        lambda: model(input_ids=ids, labels=ids).loss,
        adamw,
        torch.float16,
        scaled=True,
    )


def neox_compiled() -> Job:
    with CUDA:
        model = hugging_face(
            "GPTNeoX",
            "ForCausalLM",
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=4,
            num_attention_heads=12,
            vocab_size=50304,
            use_cache=False,
        )
    compiled, ids = torch.compile(model, mode="default"), tokens(50304, 8, 1024)
    return Job(
        model,
        lambda: compiled(input_ids=ids, labels=ids).loss,
        autocast=torch.bfloat16,
    )


def roberta() -> Job:
    """Fine-tuning: sentences of several lengths, padded to the longest allowed."""
    with CUDA:
        model = hugging_face(
            "Roberta", "ForSequenceClassification", num_labels=3, vocab_size=50265
        )
    words = [20 + 7 * sentence % 109 for sentence in range(32)]
    mask = torch.tensor([[1] * n + [0] * (128 - n) for n in words]).to(CUDA)
    ids, labels = tokens(50000, 32, 128).masked_fill(mask == 0, 1), tokens(3, 32)
    return Job(
        model,
        lambda: model(input_ids=ids, attention_mask=mask, labels=labels).loss,
        adamw,
        torch.bfloat16,
    )


def mae() -> Job:
    with CUDA:
        model = hugging_face("ViTMAE", "ForPreTraining")
    x = images(64, 3, 224, 224)
    return Job(
        model,
        lambda: model(pixel_values=x).loss,
        autocast=torch.bfloat16,
        clips=False,
    )


def wav2vec() -> Job:
    """Frames of sound that are hidden, told from the others."""
    with CUDA:
        model = AudioEncoder()
    sound, frames = torch.randn(8, 64000, device=CUDA), tokens(320, 8, 199)
    return Job(
        model,
        lambda: F.cross_entropy(model(sound).flatten(0, 1).float(), frames.flatten()),
        adamw,
        torch.float16,
        scaled=True,
    )


def gnn() -> Job:
    with CUDA:
        model = GraphNetwork()
    nodes, edges = torch.randn(40_000, 128, device=CUDA), tokens(40_000, 2, 400_000)
    labels = tokens(40, 40_000)
    return Job(
        model,
        lambda: F.cross_entropy(model(nodes, edges), labels),
        lambda each: torch.optim.Adam(each, lr=1e-3),
        clips=False,
        clears_first=True,
    )


def mamba() -> Job:
    with CUDA:
        model = Mamba().to(torch.bfloat16)
    x, y = tokens(8192, 8, 64), tokens(8192, 8, 64)
    return Job(
        model, lambda: F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
    )


def vae() -> Job:
    torch.backends.cudnn.benchmark = True
    with CUDA:
        model = ImageVae()
    x = images(64, 3, 128, 128)
    return Job(
        model,
        lambda: model(x),
        lambda each: torch.optim.Adam(each, lr=1e-3, fused=True),
        clips=False,
        clears_first=True,
        averaged=True,
    )


def clip() -> Job:
    with CUDA:
        model = hugging_face("CLIP", "Model")
    x, ids = images(64, 3, 224, 224), tokens(49000, 64, 77)
    return Job(
        model,
        lambda: model(input_ids=ids, pixel_values=x, return_loss=True).loss,
        adamw,
        torch.bfloat16,
    )


def ppo() -> Job:
    with CUDA:
        model = ActorCritic()
    seen, done = torch.randn(256, 24, device=CUDA), tokens(6, 256)
    before, gains, returns = (torch.randn(256, device=CUDA) for _ in range(3))
    return Job(
        model,
        lambda: model.loss(seen, done, before, gains, returns),
        lambda each: torch.optim.Adam(each, lr=3e-4, eps=1e-5),
        clears_first=True,
    )


# ----------------------------------------------------------------------------
# The fourth set: predicted before it was measured, and nothing was made with it.


def plain_gpt() -> Job:
    """In 32 bits, with dropout."""
    with CUDA:
        model = PlainGpt()
    x, y = tokens(16384, 8, 512), tokens(16384, 8, 512)
    return Job(
        model,
        lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten()),
        lambda each: torch.optim.AdamW(each, lr=3e-4),
        clears_first=True,
    )


def vit_compiled() -> Job:
    with CUDA:
        model = PlainVit()
    compiled, x, y = torch.compile(model), images(64, 3, 224, 224), tokens(1000, 64)
    return Job(
        model,
        lambda: F.cross_entropy(compiled(x), y, label_smoothing=0.1),
        autocast=torch.bfloat16,
    )


def resnet50() -> Job:
    with CUDA:
        model = ResNet50().to(memory_format=torch.channels_last)
    x, y = images(128, 3, 224, 224, last=True), tokens(1000, 128)
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y),
        lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9, weight_decay=1e-4),
        torch.bfloat16,
        clips=False,
        clears_first=True,
    )


def resnet50_checkpointed() -> Job:
    with CUDA:
        model = ResNet50(recomputes=True)
    x, y = images(64, 3, 224, 224), tokens(1000, 64)
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y),
        lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
        clips=False,
        clears_first=True,
    )


def plain_llama() -> Job:
    """Checkpointed and compiled."""
    with CUDA:
        model = PlainLlama().to(torch.bfloat16)
    compiled, x, y = (
        torch.compile(model),
        tokens(32000, 4, 2048),
        tokens(32000, 4, 2048),
    )
    return Job(
        model,
        lambda: F.cross_entropy(compiled(x).flatten(0, 1).float(), y.flatten()),
        clears_first=True,
    )


def gated_mlp() -> Job:
    """Images of 32 x 32, few at a time."""
    with CUDA:
        model = GatedMlp()
    x, y = images(32, 3, 32, 32), tokens(100, 32)
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y),
        lambda each: torch.optim.AdamW(each, lr=1e-3),
        clears_first=True,
    )


def volume_unet() -> Job:
    with CUDA:
        model = VolumeUNet()
    x, y = images(2, 1, 96, 96, 96), tokens(4, 2, 96, 96, 96)
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y),
        lambda each: torch.optim.SGD(each, lr=0.01, momentum=0.99, nesterov=True),
        torch.float16,
        scaled=True,
        clears_first=True,
    )


def translator() -> Job:
    with CUDA:
        model = Translator()
    words = [40 + 13 * sentence % 88 for sentence in range(64)]
    seen = torch.tensor([[1] * n + [0] * (128 - n) for n in words]).to(CUDA)
    x, y = (1 + tokens(31998, 64, 128)) * seen, 1 + tokens(31998, 64, 128)
    return Job(
        model,
        lambda: F.cross_entropy(
            model(x, y).flatten(0, 1), y.flatten(), ignore_index=0, label_smoothing=0.1
        ),
        lambda each: torch.optim.Adam(each, lr=1e-4, betas=(0.9, 0.98)),
        torch.bfloat16,
        clears_first=True,
    )


def plain_bert() -> Job:
    with CUDA:
        model = PlainBert()
    words = [64 + 17 * sentence % 193 for sentence in range(16)]
    seen = torch.tensor([[1] * n + [0] * (256 - n) for n in words]).to(CUDA)
    ids = tokens(30522, 16, 256)
    return Job(
        model,
        lambda: F.cross_entropy(model(ids, seen).flatten(0, 1), ids.flatten()),
        adamw,
        torch.float16,
        scaled=True,
        clears_first=True,
        micro_batches=4,
    )


def batch_normed() -> Job:
    """A wide network in TF32, one parameter after the other."""
    torch.set_float32_matmul_precision("high")
    with CUDA:
        model = wide_mlp()
    x, y = torch.randn(8192, 1024, device=CUDA), torch.randn(8192, 512, device=CUDA)
    return Job(
        model,
        lambda: F.mse_loss(model(x), y),
        lambda each: torch.optim.AdamW(each, lr=1e-3, foreach=False),
        clips=False,
        clears_first=True,
    )


def char_lstm() -> Job:
    with CUDA:
        model = CharLstm()
    x, y = tokens(128, 64, 256), tokens(128, 64, 256)
    return Job(
        model,
        lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten()),
        lambda each: torch.optim.Adam(each, lr=2e-3),
        clears_first=True,
    )


def gpt2_small() -> Job:
    """Of Hugging Face, in bfloat16, few tokens at a time."""
    with CUDA:
        model = hugging_face("GPT2", "LMHeadModel", use_cache=False).to(torch.bfloat16)
    ids = tokens(50257, 4, 512)
    return Job(
        model,
        lambda: model(input_ids=ids, labels=ids).loss,
        lambda each: torch.optim.AdamW(each, lr=5e-5),
        clears_first=True,
    )


# ----------------------------------------------------------------------------
# The fifth set: predicted before it was measured, and nothing was made with it.


def blocks_compiled() -> Job:
    """Each block is compiled on its own; the rate warms up."""
    with CUDA:
        model = GroupedGpt(2048, 14, 16, 4, 5632, 2048).to(torch.bfloat16)
    for block in model.blocks:
        block.compile()
    x, y = tokens(32000, 4, 2048), tokens(32000, 4, 2048)
    return Job(
        model,
        lambda: F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten()),
        schedule=lambda each: torch.optim.lr_scheduler.LambdaLR(
            each, lambda step: min(1.0, (step + 1) / 100)
        ),
    )


def half_checkpointed() -> Job:
    with CUDA:
        model = HalfCheckpointedGpt()
    x, y = tokens(32000, 8, 1024), tokens(32000, 8, 1024)
    return Job(
        model,
        lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten()),
        adamw,
        torch.bfloat16,
        clears_first=True,
        micro_batches=2,
    )


def cifar() -> Job:
    """ResNet-18 on small images that come from the host; its loss is printed."""
    with CUDA:
        model = cifar_resnet18()
    x = torch.randn(128, 3, 32, 32).pin_memory()
    y = torch.randint(0, 10, (128,)).pin_memory()
    return Job(
        model,
        lambda: F.cross_entropy(
            model(x.to(CUDA, non_blocking=True)), y.to(CUDA, non_blocking=True)
        ),
        lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9, weight_decay=5e-4),
        clips=False,
        clears_first=True,
        schedule=lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 200),
        logs=True,
    )


def resnet34_compiled() -> Job:
    with CUDA:
        model = image_net(BasicBlock, (64, 128, 256, 512))
    model = model.to(memory_format=torch.channels_last)
    compiled = torch.compile(model)
    x, y = images(192, 3, 224, 224, last=True), tokens(1000, 192)
    return Job(
        model,
        lambda: F.cross_entropy(compiled(x), y, label_smoothing=0.1),
        lambda each: torch.optim.SGD(each, lr=0.5, momentum=0.9, nesterov=True),
        torch.bfloat16,
        clips=False,
        clears_first=True,
    )


def resnext() -> Job:
    with CUDA:
        model = image_net(GroupedBottleneck, (256, 512, 1024, 2048))
    x, y = images(64, 3, 224, 224), tokens(1000, 64)
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y),
        lambda each: torch.optim.SGD(each, lr=0.01, momentum=0.9, weight_decay=1e-4),
        torch.float16,
        scaled=True,
        clips=False,
        clears_first=True,
    )


def ddpm() -> Job:
    with CUDA:
        model = Ddpm()
    x = images(48, 3, 64, 64)
    return Job(
        model,
        lambda: model(x),
        lambda each: torch.optim.Adam(each, lr=2e-4),
        torch.bfloat16,
        clears_first=True,
        ema=0.9999,
    )


def swin() -> Job:
    with CUDA:
        model = Swin()
    x, y = images(96, 3, 224, 224), tokens(1000, 96)
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y, label_smoothing=0.1),
        autocast=torch.bfloat16,
    )


def dense_moe() -> Job:
    with CUDA:
        model = ExpertGpt().to(torch.bfloat16)
    x, y = tokens(32000, 8, 1024), tokens(32000, 8, 1024)
    return Job(model, lambda: model(x, y), adamw, clears_first=True)


def gpt_graphed() -> Job:
    """Compiled with CUDA graphs."""
    with CUDA:
        model = SquaredGpt()
    compiled = torch.compile(model, mode="reduce-overhead")
    x, y = tokens(50304, 8, 512), tokens(50304, 8, 512)
    return Job(
        model,
        lambda: compiled(x, y),
        autocast=torch.bfloat16,
        clears_first=True,
    )


def alibi() -> Job:
    with CUDA:
        model = AlibiGpt()
    x, y = tokens(40000, 6, 1024), tokens(40000, 6, 1024)
    return Job(
        model,
        lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten()),
        lambda each: torch.optim.Adam(each, lr=1e-4, foreach=True),
        torch.float16,
        scaled=True,
        clears_first=True,
    )


def summarizer() -> Job:
    torch.backends.cuda.matmul.allow_tf32 = True
    with CUDA:
        model = Summarizer()
    x, y = tokens(24000, 512, 24), tokens(24000, 129, 24)
    return Job(
        model,
        lambda: F.cross_entropy(
            model(x, y[:-1]).flatten(0, 1), y[1:].flatten(), ignore_index=0
        ),
        lambda each: torch.optim.Adam(each, lr=1e-4, capturable=True),
        clears_first=True,
    )


def long_context() -> Job:
    """One sequence of 16384 words; products and attentions are kept."""
    with CUDA:
        model = LongGpt().to(torch.bfloat16)
    x, y = tokens(32000, 1, 16384), tokens(32000, 1, 16384)
    return Job(
        model, lambda: F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
    )


def wavenet() -> Job:
    with CUDA:
        model = WaveNet()
    sound = tokens(256, 8, 8193)
    return Job(
        model,
        lambda: F.cross_entropy(model(sound[:, :-1]), sound[:, 1:]),
        lambda each: torch.optim.Adam(each, lr=1e-3),
        clips=False,
        clears_first=True,
        logs=True,
    )


def distilled() -> Job:
    with CUDA:
        model = Distilled()
    x, y = tokens(32000, 16, 512), tokens(32000, 16, 512)
    return Job(
        model,
        lambda: model(x, y),
        lambda each: torch.optim.AdamW(each, lr=3e-4),
        torch.bfloat16,
        clears_first=True,
    )


def many_words() -> Job:
    with CUDA:
        model = WordyGpt().to(torch.bfloat16)
    x, y = tokens(131072, 4, 2048), tokens(131072, 4, 2048)
    return Job(
        model,
        lambda: model(x, y),
        lambda each: torch.optim.Adafactor(each, lr=1e-2),
    )


def forecaster() -> Job:
    """Small, in 32 bits; its loss is printed."""
    with CUDA:
        model = Forecaster()
    x, y = torch.randn(32, 336, 7, device=CUDA), torch.randn(32, 96, 7, device=CUDA)
    return Job(
        model,
        lambda: F.mse_loss(model(x), y),
        lambda each: torch.optim.RMSprop(each, lr=1e-4, momentum=0.9),
        clears_first=True,
        schedule=lambda each: torch.optim.lr_scheduler.ExponentialLR(each, 0.99),
        logs=True,
    )


# ----------------------------------------------------------------------------
# The sixth set: predicted before it was measured, and nothing was made with it.


def by_decay(
    parameters: Iterable[nn.Parameter], lr: float, decay: float = 0.1
) -> torch.optim.Optimizer:
    """Matrices decay; biases and norms do not."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def densenet() -> Job:
    with CUDA:
        model = DenseNet()
    x, y = images(64, 3, 224, 224), tokens(1000, 64)
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y),
        lambda each: torch.optim.SGD(
            each, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4
        ),
        torch.bfloat16,
        clips=False,
        clears_first=True,
    )


def mobilenet() -> Job:
    with CUDA:
        model = MobileNetV3().to(memory_format=torch.channels_last)
    x, y = images(256, 3, 224, 224, last=True), tokens(1000, 256)
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y, label_smoothing=0.1),
        lambda each: torch.optim.RMSprop(
            each, lr=0.064, alpha=0.9, eps=0.0316, weight_decay=1e-5, momentum=0.9
        ),
        torch.bfloat16,
        clips=False,
        clears_first=True,
        schedule=lambda each: torch.optim.lr_scheduler.StepLR(each, 2, 0.973),
    )


def deeplab() -> Job:
    """Segments images of 512 x 512; a part of the pixels has no class."""
    with CUDA:
        model = DeepLab()
    x, y = images(16, 3, 512, 512), tokens(21, 16, 512, 512)
    y[torch.rand(y.shape, device=CUDA) < 0.05] = 255
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y, ignore_index=255),
        lambda each: torch.optim.SGD(each, lr=0.01, momentum=0.9, weight_decay=1e-4),
        torch.bfloat16,
        clips=False,
        clears_first=True,
        schedule=lambda each: torch.optim.lr_scheduler.PolynomialLR(each, 1000, 0.9),
    )


def bert_compiled() -> Job:
    """In bfloat16; sentences of several lengths, and one word in seven to guess."""
    with CUDA:
        model = Bert().to(torch.bfloat16)
    compiled = torch.compile(model)
    lengths = torch.randint(128, 513, (32,), device=CUDA)
    seen = (torch.arange(512, device=CUDA) < lengths[:, None]).long()
    ids, kinds = tokens(30522, 32, 512) * seen, torch.zeros_like(seen)
    guessed = (torch.rand(32, 512, device=CUDA) < 0.15) & seen.bool()
    labels = torch.where(guessed, ids, torch.full_like(ids, -100))
    ids = ids.masked_fill(guessed, 103)
    return Job(
        model,
        lambda: F.cross_entropy(
            compiled(ids, kinds, seen).view(-1, 30522), labels.view(-1)
        ),
        adamw,
        clears_first=True,
        schedule=lambda each: torch.optim.lr_scheduler.LinearLR(each, 0.01, 1.0, 100),
    )


def gpt2_dropout() -> Job:
    """GPT-2 medium by hand, in float16."""
    with CUDA:
        model = DropoutGpt(1024, 24, 16, 50257, 1024, 0.1)
    x, y = tokens(50257, 8, 1024), tokens(50257, 8, 1024)
    return Job(
        model,
        lambda: model(x, y)[1],
        lambda each: by_decay(each, 3e-4),
        torch.float16,
        scaled=True,
        clears_first=True,
    )


def llama_1b() -> Job:
    with CUDA:
        model = HalvesLlama().to(torch.bfloat16)
    ids = tokens(32000, 2, 4097)
    x, y = ids[:, :-1], ids[:, 1:]
    return Job(
        model,
        lambda: F.cross_entropy(model(x).float().view(-1, 32000), y.reshape(-1)),
    )


def char_gpt() -> Job:
    """Letters of Shakespeare, drawn on the host; all in 32 bits."""
    with CUDA:
        model = DropoutGpt(384, 6, 6, 65, 256, 0.2, bias=False)
    text = torch.randint(0, 65, (1_000_000,))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - 256, (64,))
        x = torch.stack([text[i : i + 256] for i in starts])
        y = torch.stack([text[i + 1 : i + 257] for i in starts])
        x = x.pin_memory().to(CUDA, non_blocking=True)
        return x, y.pin_memory().to(CUDA, non_blocking=True)

    return Job(
        model,
        lambda: model(*batch())[1],
        lambda each: torch.optim.AdamW(each, lr=1e-3, betas=(0.9, 0.99), fused=True),
    )


def conformer() -> Job:
    """Sixteen seconds of sound to letters, by CTC."""
    with CUDA:
        model = Conformer()
    sound = torch.randn(32, 1600, 80, device=CUDA)
    frames, letters = torch.randint(240, 401, (32,)), torch.randint(30, 91, (32,))
    there, targets = frames.to(CUDA), torch.randint(1, 128, (32, 90), device=CUDA)
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    return Job(
        model,
        lambda: ctc(model(sound, there).transpose(0, 1), targets, frames, letters),
        lambda each: torch.optim.Adam(each, lr=5e-4, betas=(0.9, 0.98), eps=1e-9),
        torch.bfloat16,
        clears_first=True,
    )


def dcgan() -> Step:
    """Two networks against one another, as in the tutorial of PyTorch."""
    with CUDA:
        g, d = generator(), discriminator()
    g.apply(dcgan_start)
    d.apply(dcgan_start)
    criterion = nn.BCELoss()
    for_d = torch.optim.Adam(d.parameters(), lr=0.0002, betas=(0.5, 0.999))
    for_g = torch.optim.Adam(g.parameters(), lr=0.0002, betas=(0.5, 0.999))
    real = images(256, 3, 64, 64)

    def step() -> None:
        d.zero_grad()
        label = torch.full((256,), 1.0, dtype=torch.float, device=CUDA)
        of_real = criterion(d(real).view(-1), label)
        of_real.backward()
        fake = g(torch.randn(256, 100, 1, 1, device=CUDA))
        label.fill_(0.0)
        of_fake = criterion(d(fake.detach()).view(-1), label)
        of_fake.backward()
        for_d.step()
        g.zero_grad()
        label.fill_(1.0)
        of_g = criterion(d(fake).view(-1), label)
        of_g.backward()
        for_g.step()
        both = of_real + of_fake
        print(f"{both.item():.3f} {of_g.item():.3f}", file=sys.stderr)

    return step


def nerf() -> Job:
    """4096 rays of 64 and 192 samples, with products in TF32."""
    torch.set_float32_matmul_precision("high")
    with CUDA:
        model = Nerf()
    starts, directions = (torch.randn(4096, 3, device=CUDA) for _ in range(2))
    colors = torch.rand(4096, 3, device=CUDA)

    def loss() -> torch.Tensor:
        rough, sharp = model(starts, directions)
        return F.mse_loss(rough, colors) + F.mse_loss(sharp, colors)

    return Job(
        model,
        loss,
        lambda each: torch.optim.Adam(each, lr=5e-4),
        clips=False,
        clears_first=True,
        schedule=lambda each: torch.optim.lr_scheduler.ExponentialLR(each, 0.9999),
    )


# ----------------------------------------------------------------------------
# The seventh set: predicted before it was measured, and nothing was made with it.


class Lion(torch.optim.Optimizer):
    """Steps by the sign of the momentum."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """As in the paper, by lists."""
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            for each in parameters:
                if "momentum" not in self.state[each]:
                    self.state[each]["momentum"] = torch.zeros_like(each)
            grads = [each.grad for each in parameters]
            momenta = [self.state[each]["momentum"] for each in parameters]
            updates = torch._foreach_mul(momenta, 0.9)
            torch._foreach_add_(updates, grads, alpha=0.1)
            updates = torch._foreach_sign(updates)
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, grads, 0.01)


def deit() -> Job:
    """Two images in one, and its two classes; a large batch."""
    with CUDA:
        model = Deit()
    x, y = images(384, 3, 224, 224), tokens(1000, 384)

    def loss() -> torch.Tensor:
        part = random.betavariate(0.8, 0.8)
        mixed = part * x + (1 - part) * x.flip(0)
        hot = torch.full((384, 1000), 0.1 / 1000, device=CUDA)
        hot.scatter_(1, y[:, None], 0.9 + 0.1 / 1000)
        target = part * hot + (1 - part) * hot.flip(0)
        return -(target * model(mixed).log_softmax(-1)).sum(-1).mean()

    return Job(
        model,
        loss,
        lambda each: by_decay(each, 4e-3, 0.05),
        torch.bfloat16,
        clears_first=True,
        ema=0.9999,
    )


def video() -> Job:
    """Sixteen frames; each block is compiled."""
    with CUDA:
        model = VideoTransformer()
    for block in model.blocks:
        block.compile()
    x, y = images(24, 3, 16, 224, 224), tokens(400, 24)
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y, label_smoothing=0.1),
        lambda each: torch.optim.SGD(
            each, lr=0.005, momentum=0.9, nesterov=True, weight_decay=1e-4
        ),
        torch.bfloat16,
        clips=False,
        clears_first=True,
    )


def muon() -> Step:
    """Matrices by Muon, the rest by Adam; the model is compiled."""
    with CUDA:
        model = CappedGpt()
    compiled = torch.compile(model)
    x, y = tokens(50304, 16, 1024), tokens(50304, 16, 1024)
    matrices = [each for each in model.blocks.parameters() if each.dim() == 2]
    scales = [each for each in model.blocks.parameters() if each.dim() < 2]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0),
        torch.optim.Adam(
            [
                {"params": [model.words.weight], "lr": 0.3},
                {"params": [model.head.weight], "lr": 0.002},
                {"params": scales, "lr": 0.02},
            ],
            betas=(0.8, 0.95),
            fused=True,
        ),
    ]

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(x, y)
        loss.backward()
        for each in optimizers:
            each.step()
        model.zero_grad(set_to_none=True)

    return step


def retention() -> Job:
    """In bfloat16, four batches a step."""
    with CUDA:
        model = RetNet().to(torch.bfloat16)
    x, y = tokens(32000, 8, 2048), tokens(32000, 8, 2048)
    return Job(
        model,
        lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten()),
        lambda each: Lion(each, 1e-4, 1.0),
        micro_batches=4,
    )


def super_resolution() -> Job:
    torch.backends.cudnn.benchmark = True
    with CUDA:
        model = SuperResolution().to(memory_format=torch.channels_last)
    x, y = images(32, 3, 48, 48, last=True), images(32, 3, 192, 192, last=True)
    return Job(
        model,
        lambda: F.l1_loss(model(x), y),
        lambda each: torch.optim.Adam(each, lr=1e-4, betas=(0.9, 0.99)),
        torch.float16,
        scaled=True,
        clips=False,
        clears_first=True,
        schedule=lambda each: torch.optim.lr_scheduler.StepLR(each, 200),
    )


def point_cloud() -> Job:
    """Points of objects to their class; all in 32 bits."""
    with CUDA:
        model = PointCloudNet()
    x, y = torch.randn(32, 3, 1024, device=CUDA), tokens(40, 32)
    return Job(
        model,
        lambda: F.cross_entropy(model(x), y, label_smoothing=0.2),
        lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9, weight_decay=1e-4),
        clips=False,
        clears_first=True,
        schedule=lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 250),
    )


def dpo() -> Job:
    """The better of two answers should be likelier than for a frozen copy."""
    with CUDA:
        policy = HalvesLlama(1536, 16, 12, 4096, 32000, 1024).to(torch.bfloat16)
    frozen = copy.deepcopy(policy).eval().requires_grad_(False)
    ids = tokens(32000, 8, 1024)  # four better answers, and four worse ones
    answers = torch.arange(1024, device=CUDA) >= torch.tensor(
        [[200], [300], [150], [400]] * 2, device=CUDA
    )

    def likelihoods(model: nn.Module) -> torch.Tensor:
        logs = model(ids)[:, :-1].float().log_softmax(-1)
        each = torch.gather(logs, 2, ids[:, 1:, None]).squeeze(2)
        return (each * answers[:, 1:]).sum(-1)

    def loss() -> torch.Tensor:
        better, worse = likelihoods(policy).chunk(2)
        with torch.no_grad():
            was_better, was_worse = likelihoods(frozen).chunk(2)
        gained = (better - worse) - (was_better - was_worse)
        return -F.logsigmoid(0.1 * gained).mean()

    return Job(policy, loss, lambda each: torch.optim.RMSprop(each, lr=5e-7))


def sorted_experts() -> Job:
    with CUDA:
        model = SortedExpertsGpt().to(torch.bfloat16)
    x, y = tokens(32000, 8, 1024), tokens(32000, 8, 1024)
    return Job(
        model,
        lambda: F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten()),
    )


def fourier() -> Job:
    """Fields of 128 x 128 to later ones; all in 32 bits, a part of it complex."""
    with CUDA:
        model = FourierOperator()
    x, y = torch.randn(32, 128, 128, 1, device=CUDA), images(32, 128, 128, 1)

    def loss() -> torch.Tensor:
        off = torch.linalg.vector_norm((model(x) - y).flatten(1), dim=1)
        return (off / torch.linalg.vector_norm(y.flatten(1), dim=1)).sum()

    return Job(
        model,
        loss,
        lambda each: torch.optim.Adam(each, lr=1e-3, weight_decay=1e-4),
        clips=False,
        clears_first=True,
    )


def seq2seq() -> Job:
    """Word after word, in 32 bits."""
    with CUDA:
        model = AttendingGru()
    source, target = tokens(10000, 128, 40), tokens(10000, 128, 41)
    x, y = target[:, :-1], target[:, 1:]
    return Job(
        model,
        lambda: F.cross_entropy(
            model(source, x).flatten(0, 1), y.flatten(), ignore_index=0
        ),
        lambda each: torch.optim.Adam(each, lr=1e-3),
        clears_first=True,
        logs=True,
    )


def soft_actor() -> Step:
    """SAC: an update from what was seen before, with three optimizers."""
    seen, actions = 17, 6
    with CUDA:
        actor, critic = SoftActor(seen, actions), TwinCritic(seen, actions)
        target = copy.deepcopy(critic).requires_grad_(False)
        heat = torch.zeros(1, requires_grad=True)
        before, after = (torch.randn(100_000, seen) for _ in range(2))
        acted = 2 * torch.rand(100_000, actions) - 1
        rewards, goes_on = torch.randn(100_000, 1), torch.ones(100_000, 1)
    for_actor = torch.optim.Adam(actor.parameters(), lr=3e-4)
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for_heat = torch.optim.Adam([heat], lr=1e-3)

    def step() -> None:
        rows = torch.randint(0, 100_000, (256,), device=CUDA)
        s, a, r, n = before[rows], acted[rows], rewards[rows], after[rows]
        alpha = heat.exp().detach()
        with torch.no_grad():
            action, chance = actor(n)
            worth = torch.min(*target(n, action)) - alpha * chance
            goal = r + 0.99 * goes_on[rows] * worth
        one, two = critic(s, a)
        for_critic.zero_grad()
        (F.mse_loss(one, goal) + F.mse_loss(two, goal)).backward()
        for_critic.step()
        action, chance = actor(s)
        for_actor.zero_grad()
        (alpha * chance - torch.min(*critic(s, action))).mean().backward()
        for_actor.step()
        for_heat.zero_grad()
        (-heat.exp() * (chance.detach() - actions)).mean().backward()
        for_heat.step()
        with torch.no_grad():
            pairs = zip(target.parameters(), critic.parameters(), strict=True)
            for old, new in pairs:
                old.mul_(0.995)
                old.add_(0.005 * new)

    return step


def wgan_gp() -> Step:
    """Five steps of the critic to one; its gradient should have length one."""
    with CUDA:
        g, d = generator(128, 64), plain_critic()
    for_d = torch.optim.Adam(d.parameters(), lr=1e-4, betas=(0.0, 0.9))
    for_g = torch.optim.Adam(g.parameters(), lr=1e-4, betas=(0.0, 0.9))
    real = images(64, 3, 64, 64)

    def penalty(fake: torch.Tensor) -> torch.Tensor:
        part = torch.rand(64, 1, 1, 1, device=CUDA)
        between = (part * real + (1 - part) * fake).requires_grad_(True)
        scores = d(between)
        (slope,) = torch.autograd.grad(
            scores, between, torch.ones_like(scores), create_graph=True
        )
        return ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()

    def step() -> None:
        for _ in range(5):
            with torch.no_grad():
                fake = g(torch.randn(64, 128, 1, 1, device=CUDA))
            for_d.zero_grad()
            worse = d(fake).mean() - d(real).mean()
            (worse + 10 * penalty(fake)).backward()
            for_d.step()
        for_g.zero_grad()
        (-d(g(torch.randn(64, 128, 1, 1, device=CUDA))).mean()).backward()
        for_g.step()
        print(f"{worse.item():.3f}", file=sys.stderr)

    return step


SETS: dict[str, list[Callable[[], Job | Step]]] = {
    "first": [
        gpt2_medium,
        gpt2_accumulated,
        llama_checkpointed,
        llama_compiled,
        bert,
        t5,
        mixtral,
        unet,
        convnext,
        lstm,
        encoder,
        dlrm,
        mlp,
    ],
    "second": [
        qwen,
        gemma,
        vit,
        whisper,
        nanogpt_compiled,
        nanogpt_tf32,
        efficientnet,
        mixer,
        dit,
        llama_lora,
    ],
    "third": [
        llama_fp16,
        neox_compiled,
        roberta,
        mae,
        wav2vec,
        gnn,
        mamba,
        vae,
        clip,
        ppo,
    ],
    "fourth": [
        plain_gpt,
        vit_compiled,
        resnet50,
        resnet50_checkpointed,
        plain_llama,
        gated_mlp,
        volume_unet,
        translator,
        plain_bert,
        batch_normed,
        char_lstm,
        gpt2_small,
    ],
    "fifth": [
        blocks_compiled,
        half_checkpointed,
        cifar,
        resnet34_compiled,
        resnext,
        ddpm,
        swin,
        dense_moe,
        gpt_graphed,
        alibi,
        summarizer,
        long_context,
        wavenet,
        distilled,
        many_words,
        forecaster,
    ],
    "sixth": [
        densenet,
        mobilenet,
        deeplab,
        bert_compiled,
        gpt2_dropout,
        llama_1b,
        char_gpt,
        conformer,
        dcgan,
        nerf,
    ],
    "seventh": [
        deit,
        video,
        muon,
        retention,
        super_resolution,
        point_cloud,
        dpo,
        sorted_experts,
        fourier,
        seq2seq,
        soft_actor,
        wgan_gp,
    ],
}

BUILDERS = {each.__name__: each for jobs in SETS.values() for each in jobs}


def after_step(
    job: Job, optimizer: torch.optim.Optimizer
) -> list[Callable[[], object]]:
    """What follows the optimizer: averages of the model, and the next rate."""
    followers: list[Callable[[], object]] = []
    if job.averaged:
        average = copy.deepcopy(job.model).requires_grad_(False)

        @torch.no_grad()
        def follow() -> None:
            pairs = zip(average.parameters(), job.model.parameters(), strict=True)
            for one, other in pairs:
                one.lerp_(other, 0.01)

        followers.append(follow)
    if job.schedule:
        followers.append(job.schedule(optimizer).step)
    if job.ema:
        ema = AveragedModel(job.model, multi_avg_fn=get_ema_multi_avg_fn(job.ema))
        followers.append(partial(ema.update_parameters, job.model))
    return followers


def stepper(job: Job | Step) -> Step:
    """One step of training, and its optimizer."""
    if not isinstance(job, Job):
        return job
    parameters = [each for each in job.model.parameters() if each.requires_grad]
    optimizer = job.optimizer(parameters)
    scaler = torch.amp.GradScaler("cuda") if job.scaled else None
    followers = after_step(job, optimizer)

    def step() -> None:
        if job.clears_first:
            optimizer.zero_grad()
        for _ in range(job.micro_batches):
            cast = (
                torch.autocast("cuda", dtype=job.autocast)
                if job.autocast
                else contextlib.nullcontext()
            )
            with cast:
                loss = job.loss() / job.micro_batches
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None and job.clips:
            scaler.unscale_(optimizer)
        if job.clips:
            nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if not job.clears_first:
            optimizer.zero_grad()
        for follow in followers:
            follow()
        if job.logs:
            print(f"loss {loss.item():.3f}", file=sys.stderr)

    return step


def train(job: Job | Step, steps: int) -> dict[str, float]:
    """Milliseconds of a step, and bytes."""
    step = stepper(job)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    each = [one.elapsed_time(other) for one, other in itertools.pairwise(marks)]
    return {
        "ms": sum(each) / steps,
        "median_ms": statistics.median(each),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "steady": torch.cuda.memory_allocated(),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    if len(sys.argv) < 2 or sys.argv[1] not in BUILDERS:
        raise SystemExit(f"Name one of {', '.join(BUILDERS)}.")
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 15
    print(json.dumps(train(BUILDERS[sys.argv[1]](), count)))
