"""What torch says in schemas, as the legality check reads it."""

import pytest
import torch
import torch.nn.functional as F

from torchspmd import _torch

pytestmark = pytest.mark.unit

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def test_signature_of():
    add = _torch.signature_of(aten.add_.Tensor)
    assert (add.name, add.overload) == ("aten::add", "Tensor")
    assert (add.arguments, add.written) == (("self", "other", "alpha"), ("self",))
    assert add.defaults == {"alpha": 1}
    assert add.is_elementwise and not add.is_random
    assert _torch.signature_of(aten.bernoulli.p).is_random
    assert not _torch.signature_of(aten.mm.default).is_elementwise


def test_signatures_of_collectives_and_lists():
    into = _torch.signature_of(c10d.all_gather_into_tensor_out.default)
    plain = _torch.signature_of(c10d.all_gather_into_tensor.default)
    assert (into.name, into.arguments) == (plain.name, plain.arguments)
    assert (into.written, plain.written) == (("out",), ())
    fused = _torch.signature_of(aten._fused_adamw_.tensor_lr)
    assert (fused.name, fused.overload) == ("aten::_fused_adamw", "tensor_lr")
    assert fused.written == (
        "self",
        "grads",
        "exp_avgs",
        "exp_avg_sqs",
        "max_exp_avg_sqs",
    )
    assert _torch.signature_of(aten._foreach_add_.List).name == "aten::_foreach_add"


def test_draws_random_numbers():
    """Attention draws only for dropout."""
    cudnn = aten._scaled_dot_product_cudnn_attention
    tensors = (None,) * 4
    assert not _torch.draws_random_numbers(cudnn.default, (*tensors, True), {})
    assert not _torch.draws_random_numbers(cudnn.default, (*tensors, True, 0.0), {})
    assert _torch.draws_random_numbers(cudnn.default, (*tensors, True, 0.1), {})
    # It is given the seed of its forward.
    backward = aten._scaled_dot_product_cudnn_attention_backward.default
    assert torch.Tag.nondeterministic_seeded in backward.tags
    assert not _torch.draws_random_numbers(backward, (None,) * 13 + (0.1,), {})
    assert not _torch.signature_of(backward).is_random
    assert _torch.draws_random_numbers(aten.bernoulli.p, (None, 0.5), {})
    assert not _torch.draws_random_numbers(len, (), {})


def test_only_has_effects():
    library = torch.library.Library("only_has_effects", "FRAGMENT")
    library.define("log(Tensor x) -> ()")
    library.define("write(Tensor(a!) x) -> ()")
    operators = torch.ops.only_has_effects
    assert _torch.only_has_effects(operators.log.default)
    assert not _torch.only_has_effects(operators.write.default)
    assert not _torch.only_has_effects(aten.add.Tensor)
    assert not _torch.only_has_effects(aten._assert_async.msg)  # known to fx
    assert not _torch.only_has_effects(len)


def test_decomposition():
    """From torch's table, or what a composite operator is made of."""
    value = torch.tensor([1.0, 3.0])
    loss = _torch.decomposition(aten.mse_loss.default)
    assert loss is not None
    assert loss(value, value - 2).item() == 4.0
    composite = _torch.decomposition(aten.log_sigmoid.default)
    assert composite is not None
    torch.testing.assert_close(composite(value), F.logsigmoid(value))
    assert _torch.decomposition(aten.avg_pool2d_backward.default) is None
