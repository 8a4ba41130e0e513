"""Models of transformers in the default mode, with an attention mask, against one device.

The masks differ between the ranks, and in one step nothing is masked: eager then leaves the
mask out, and a graph that was captured with either must be right for both.
"""

import pytest
import torch
import torch.distributed as dist

from torchspmd.errors import CaptureError
from torchspmd.step import compile

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=8, n_layer=1, n_head=2, n_positions=16
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config)


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def opt():  # asks for each layer whether a random number is below 0
    sizes = {**SIZES, "ffn_dim": 16, "word_embed_proj_dim": 8}
    del sizes["intermediate_size"]
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes))


def train(make, wrap, rows):
    def step(model, optim, batch):
        loss = model(**batch).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss

    torch.manual_seed(0)
    model = make()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, losses = wrap(step), []
    for number in range(2):
        torch.manual_seed(number)  # dropout: what one device draws
        ids = torch.randint(3, 32, (4, 6))
        mask = torch.ones_like(ids)
        if number == 0:
            mask[0, 4:] = mask[3, 2:] = 0
        labels = torch.where(mask == 1, ids, -100)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        batch = {name: value[rows] for name, value in batch.items()}
        losses.append(wrapped(model, optim, batch).detach())
    return losses, [p.detach() for p in model.parameters()]


def all_wrong():
    start = 2 * dist.get_rank()
    wrong = []
    for make in (gpt2, llama, bert, opt):
        whole = train(make, lambda step: step, slice(0, 4))
        ours = train(make, compile, slice(start, start + 2))
        try:
            torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            wrong.append((make.__name__, str(error)))
    return wrong


def test_models_with_an_attention_mask(ranks2):
    assert ranks2.run(all_wrong, timeout=240) == [[], []]


def refused():
    def step(model, x):
        return model(**x, output_hidden_states=True).loss

    ids = torch.randint(3, 32, (2, 6))
    asks = transformers.utils.import_utils.is_fake_tensor
    try:
        compile(step)(gpt2(), {"input_ids": ids, "labels": ids})
    except CaptureError as error:
        assert transformers.utils.import_utils.is_fake_tensor is asks
        return str(error)


def test_hooks_that_a_first_forward_puts_on(ranks2):
    text, _ = ranks2.run(refused)
    assert "_forward_hooks: its items" in text
    assert "call it once before, eagerly" in text
