"""Lay a Hugging Face Llama over eight simulated devices, and see what it will send.

The model is built from its config with random weights: nothing is downloaded. The mesh is
a fake one, so this runs on a laptop: python examples/parallelize_llama.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torchspmd import CommDebugMode, Plan, auto_plan, parallelize_module
from torchspmd.testing import fake_mesh

BATCH, SEQ = 2, 64
# The shape of Llama-3-8B, with fewer and narrower layers.
CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=896,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=SEQ,
)


def build_8b() -> LlamaForCausalLM:
    """The real size, for `torchspmd plan examples/parallelize_llama.py:build_8b`."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
    )


def main() -> None:
    model = LlamaForCausalLM(CONFIG)

    # The plan that the model carries; the same one is found from the model's graph.
    plan = Plan.from_transformers(model)
    assert auto_plan(model) == plan
    # Query, key and value read one tensor, gate and up another: sum each gradient once.
    plan = plan.share_inputs(model)

    # What it will do, before it is done.
    preview = plan.preview(model, {"tp": 8}, batch=BATCH, seq=SEQ)
    print(preview)

    # Do it, run one training step, and compare what was sent with what was foretold.
    with fake_mesh(8, ("tp",)) as mesh:
        model = parallelize_module(model, mesh, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.randint(CONFIG.vocab_size, (BATCH, SEQ))
        with CommDebugMode() as mode:
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    foretold, sent = preview.ledger.total(), mode.ledger.total()
    print(f"\nforetold: {foretold.count} collectives, {foretold.wire_bytes} bytes sent")
    print(f"recorded: {sent.count} collectives, {sent.wire_bytes} bytes sent")
    assert foretold == sent


if __name__ == "__main__":
    main()
