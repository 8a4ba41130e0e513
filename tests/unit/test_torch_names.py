"""Each private torch name that torchspmd uses, on the installed torch.

Those that need a process group are tested in tests/fake/test_torch_names_fake.py.
"""

import ast
import contextlib
import copy
import inspect
import math
import operator
import sys
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import GradScaler
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.optim import _adafactor, asgd
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from torchspmd import CommDebugMode, _torch
from torchspmd._torch import LANDMARKS, Landmark
from torchspmd.step.graph.generated import RunningGraph
from torchspmd.testing import fake_world

_TESTS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent


def _exported_functions():
    return sorted(n for n, v in vars(_torch).items() if inspect.isfunction(v))


def _functions_in(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


# The lists themselves.
def test_every_exported_function_has_a_test_of_its_name():
    files = [Path(__file__), *_TESTS.rglob("test_torch_names_*.py")]
    tested = set().union(*map(_functions_in, files))
    missing = [n for n in _exported_functions() if f"test_{n}" not in tested]
    assert len(_exported_functions()) > 40
    assert missing == []


@pytest.mark.parametrize(("path", "function"), LANDMARKS)
def test_landmark_is_in_the_installed_torch(path, function):
    file = _TORCH.parent / path
    assert file.is_file()
    assert function is None or function in _functions_in(file)


def test_every_landmark_means_something():
    meanings = {v for n, v in vars(Landmark).items() if not n.startswith("_")}
    assert {*LANDMARKS.values(), Landmark.GRAPH} == meanings


# Autograd.
def test_sequence_number():
    before = _torch.sequence_number()
    output = torch.ones(1, requires_grad=True) * 2
    assert _torch.sequence_number() == before + 1
    assert _torch.node_sequence(output.grad_fn) == before


def test_node_sequence():
    first = torch.ones(1, requires_grad=True) * 2
    second = first * 2
    later = _torch.node_sequence(second.grad_fn)
    assert later == _torch.node_sequence(first.grad_fn) + 1


def _during_backward(function):
    seen = []
    tensor = torch.ones(1, requires_grad=True)
    output = tensor * 2
    tensor.register_hook(lambda grad: seen.append(function()))
    for _ in range(2):
        output.backward(retain_graph=True)
    return output.grad_fn, seen


def test_graph_task():
    _, (first, second) = _during_backward(_torch.graph_task)
    assert _torch.graph_task() == -1
    assert 0 <= first < second


def test_after_backward():
    order = []

    def first():
        order.append("first")
        _torch.after_backward(lambda: order.append("last"))

    def ask(gradient):
        _torch.after_backward(first)
        _torch.after_backward(lambda: order.append("second"))

    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(ask)
    tensor.register_post_accumulate_grad_hook(lambda t: order.append("added"))
    (tensor * 2).backward()
    assert order == ["added", "first", "second", "last"]


def test_current_node():
    _, (first, second) = _during_backward(lambda: _torch.current_node().name())
    assert _torch.current_node() is None
    assert first == second == "torch::autograd::AccumulateGrad"


# Compilation.
def test_is_tracing_for_compile():
    assert not _torch.is_tracing_for_compile()
    with tracing(TracingContext(FakeTensorMode())):
        assert _torch.is_tracing_for_compile()
    assert not _torch.is_tracing_for_compile()


def test_load_compiler():
    _torch.load_compiler()
    assert "torch._dynamo" in sys.modules


def test_start_kernel_compilers(monkeypatch):
    from torch._inductor.async_compile import AsyncCompile

    started = []
    monkeypatch.setattr(
        "torch._inductor.async_compile.has_triton_package", lambda: True
    )
    for name in ("warm_pool", "wakeup"):
        monkeypatch.setattr(AsyncCompile, name, lambda name=name: started.append(name))
    _torch.start_kernel_compilers()
    assert "warm_pool" in started


def test_splits_products():
    from torch._inductor import config

    assert not _torch.splits_products()
    with config.patch(_micro_pipeline_tp=True):
        assert _torch.splits_products()


def test_is_compiled_module():
    module = nn.Linear(2, 2)
    assert not _torch.is_compiled_module(module)
    assert _torch.is_compiled_module(torch.compile(module, backend="eager"))
    assert not _torch.is_compiled_module(module)
    module.compile(backend="eager")
    assert _torch.is_compiled_module(module)


def test_on_graph_replay(monkeypatch):
    calls = []
    graph_class = torch.cuda.CUDAGraph
    monkeypatch.setattr(graph_class, "replay", lambda graph: calls.append("replay"))
    plain = graph_class.replay
    graph = object()
    undo_first = _torch.on_graph_replay(lambda: calls.append("first"))
    undo_second = _torch.on_graph_replay(lambda: calls.append("second"))
    graph_class.replay(graph)
    assert calls == ["first", "second", "replay"]
    undo_first()
    graph_class.replay(graph)
    assert calls[3:] == ["second", "replay"]
    undo_second()
    assert graph_class.replay is plain


def test_graph_replay_is_torchs_own_again():
    before = dict(vars(torch.cuda.CUDAGraph))
    undo = _torch.on_graph_replay(lambda: None)
    assert vars(torch.cuda.CUDAGraph)["replay"] is not before["replay"]
    undo()
    assert dict(vars(torch.cuda.CUDAGraph)) == before


def test_tell_graph_replay():
    calls = []
    undo = _torch.on_graph_replay(lambda: calls.append("replayed"))
    _torch.tell_graph_replay()
    undo()
    _torch.tell_graph_replay()
    assert calls == ["replayed"]


def test_cuda_graphs_as():
    class Graph:
        pass

    before = torch.cuda.CUDAGraph, torch.cuda.graphs.graph_pool_handle
    with _torch.cuda_graphs_as(Graph, lambda: (7, 0), lambda: True):
        assert torch.cuda.CUDAGraph is torch.cuda.graphs.CUDAGraph is Graph
        assert torch.cuda.graphs.graph_pool_handle() == (7, 0)
        assert torch.cuda.is_current_stream_capturing()
        assert torch.cuda.graph.default_capture_stream is None
        torch._C._host_emptyCache()
    assert (torch.cuda.CUDAGraph, torch.cuda.graphs.graph_pool_handle) == before


def test_call_step_hooks():
    from torch.optim import optimizer as hooks

    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    told = []
    registered = [
        hooks.register_optimizer_step_post_hook(lambda *_: told.append("after")),
        hooks.register_optimizer_step_pre_hook(lambda of, *_: told.append(of)),
    ]
    _torch.call_step_hooks(sgd)
    for each in registered:
        each.remove()
    assert told == [sgd, "after"]


# The dispatcher.
@pytest.fixture
def twice():
    library = torch.library.Library("torchspmd_test", "FRAGMENT")
    library.define("twice(Tensor x, *, int times=2) -> Tensor")
    library.impl("twice", lambda x, *, times=2: x * times, "CPU")
    yield torch.ops.torchspmd_test.twice.default
    library._destroy()


def test_registered_operators(twice):
    assert list(_torch.registered_operators(("torchspmd_test",))) == [twice]
    c10d = {op.name() for op in _torch.registered_operators(("c10d",))}
    assert "c10d::allreduce_" in c10d
    assert {name.partition("::")[0] for name in c10d} == {"c10d"}


def test_operator_generation():
    before = _torch.operator_generation()
    assert _torch.operator_generation() == before
    library = torch.library.Library("torchspmd_test_more", "FRAGMENT")
    library.define("one(Tensor x) -> Tensor")
    assert _torch.operator_generation() != before
    library._destroy()


def test_profiled():
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as seen:
        with _torch.profiled("torchspmd::test"):
            torch.ones(2)
    assert "torchspmd::test" in [event.key for event in seen.key_averages()]


def test_packet_name(twice):
    assert _torch.packet_name(twice) == "torchspmd_test::twice"
    assert _torch.packet_name(torch.ops.aten.add.Scalar) == "aten::add"


def test_argument_names(twice):
    assert _torch.argument_names(twice) == ("x", "times")


def test_observe(twice):
    seen = []

    def kernel(keyset, *args, **kwargs):
        seen.append((args, kwargs))
        return _torch.call_below(twice, keyset, args, kwargs)

    undo = _torch.observe({twice: kernel})
    tensor = torch.ones(2)
    results = [twice(tensor, times=3), twice(tensor)]
    undo()
    after = twice(tensor)
    assert [float(result.sum()) for result in (*results, after)] == [6, 4, 4]
    assert [kwargs for _, kwargs in seen] == [{"times": 3}, {}]


def test_call_below(twice):
    def kernel(keyset, *args, **kwargs):
        return _torch.call_below(twice, keyset, args, {"times": 10})

    undo = _torch.observe({twice: kernel})
    try:
        assert twice(torch.ones(1)).item() == 10
    finally:
        undo()
    assert twice(torch.ones(1)).item() == 2


# Landmarks.
def test_landmark_of_generated_code():
    graph = torch.fx.symbolic_trace(nn.Linear(2, 2))
    assert _torch.landmark(graph.forward.__code__) == Landmark.GRAPH
    assert _torch.landmark(eval("lambda: 0").__code__) is None


@pytest.mark.parametrize("num_lines", [1, 3])
def test_running_node(num_lines):
    seen = []

    def look():
        frame = sys._getframe(1)
        seen.append(_torch.running_node(frame))

    graph = torch.fx.Graph()
    nodes = [graph.call_function(look) for _ in range(num_lines)]
    graph.output(None)
    module = torch.fx.GraphModule({}, graph)
    module()
    RunningGraph.of(module)()
    assert seen == [*nodes, *nodes]
    look()
    assert seen[-1] is None


def test_is_first_ddp_step():
    with fake_world(2):
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert _torch.is_first_ddp_step(model)
        model(torch.ones(1, 2)).sum().backward()
        assert not _torch.is_first_ddp_step(model)
    assert not _torch.is_first_ddp_step(nn.Linear(2, 2))


def test_has_first_buckets():
    for is_static in (True, False):
        with fake_world(2), _torch.ddp_on_fake_groups():
            layer = nn.Linear(2, 2)
            model = nn.parallel.DistributedDataParallel(layer, static_graph=is_static)
            for first in (is_static, is_static, False):
                model(torch.ones(1, 2)).sum().backward()
                assert _torch.has_first_buckets(nn.Sequential(model)) == first


def test_landmark():
    assert _torch.landmark(nn.Module._call_impl.__code__) == Landmark.MODULE_CALL
    clip = inspect.unwrap(nn.utils.clip_grad_norm_).__code__
    assert _torch.landmark(clip) == Landmark.OPTIMIZER
    assert _torch.landmark(nn.Linear.forward.__code__) is None
    assert _torch.landmark(test_landmark.__code__) is None


def test_is_torch_code():
    assert _torch.is_torch_code(nn.Linear.forward.__code__)
    assert _torch.is_torch_code(compile("1", "<eval_with_key>.3", "eval"))
    assert not _torch.is_torch_code(test_is_torch_code.__code__)
    assert not _torch.is_torch_code(copy.copy.__code__)


# Trees and tensors.
def test_flatten_tree():
    leaves, structure = _torch.flatten_tree({"a": [1, (2, None)], "b": 3})
    assert leaves == [1, 2, None, 3]
    assert structure.num_leaves == 4


def test_unflatten_tree():
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, structure = _torch.flatten_tree(tree)
    assert _torch.unflatten_tree(leaves, structure) == tree
    changed = _torch.unflatten_tree([0, 0, 0, 0], structure)
    assert changed == {"a": [0, (0, 0)], "b": 0}


def test_map_tensors():
    tree = {"a": [torch.ones(1), (2,)]}
    assert _torch.map_tensors(len, tree) == {"a": [1, (2,)]}


def test_map_tree():
    assert _torch.map_tree(str, {"a": [1, (2,)]}) == {"a": ["1", ("2",)]}


def test_leaves_of():
    class Own(UserDict):  # which torch takes for a leaf
        pass

    tree = {"a": [1, ("x", 2)], "b": Own(c=3, d=["y"]), "e": None}
    assert list(_torch.leaves_of(int, tree)) == [1, 2, 3]
    assert list(_torch.leaves_of(str, tree)) == ["x", "y"]


def test_leaf_paths():
    tree = {"a": [1, (2,)], "b": 3}
    assert _torch.leaf_paths(tree) == [("a", 0), ("a", 1, 0), ("b",)]
    assert _torch.leaf_paths(5) == [()]


def test_is_fake():
    with FakeTensorMode():
        assert _torch.is_fake(torch.empty(2))
    assert _torch.is_fake(torch.empty(2, device="meta"))
    assert not _torch.is_fake(torch.empty(2))


def test_observe_calls():
    seen = []
    with _torch.observe_calls(lambda op, args, kwargs: seen.append(op)):
        torch.ones(2) + 1
    torch.ones(2) + 1
    assert seen == [torch.ops.aten.ones.default, torch.ops.aten.add.Tensor]


def test_is_in_custom_function():
    inside = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            inside.append(_torch.is_in_custom_function(None))
            inside.append(_torch.is_in_custom_function(Note.forward.__code__))
            return value

    Note.apply(torch.ones(1))
    assert inside == [True, False]
    assert not _torch.is_in_custom_function(None)


def test_is_autocast_enabled():
    assert not _torch.is_autocast_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _torch.is_autocast_enabled()


def test_attention_kernels():
    before = _torch.attention_kernels()
    with sdpa_kernel(SDPBackend.MATH):
        assert _torch.attention_kernels() == (False, False, True, False)
    assert _torch.attention_kernels() == before


def test_function_modes():
    assert _torch.function_modes() == ()
    with torch.device("meta"):
        ((kind, *plain),) = _torch.function_modes()
        assert kind is DeviceContext
        assert ("device", "meta") in plain
    assert _torch.function_modes() == ()


def test_saved_tensor_hooks():
    assert _torch.saved_tensor_hooks() == ()
    with torch.autograd.graph.save_on_cpu():
        pack, unpack = _torch.saved_tensor_hooks()
        assert pack.co_name == "pack_to_cpu"
        assert unpack.co_name == "unpack_from_cpu"
    assert _torch.saved_tensor_hooks() == ()


def test_optimizer_tables():
    optimizers = torch.optim
    for kind, options in (
        (optimizers.SGD, {"fused": True}),
        (optimizers.AdamW, {"fused": True}),
        (optimizers.Adagrad, {"fused": True}),
        (optimizers.ASGD, {}),
        (optimizers.Muon, {}),
    ):
        optim = kind([torch.nn.Parameter(torch.zeros(1, 1))], **options)
        assert _torch.OPTIMIZER_TABLES.issuperset(vars(optim))


def test_foreach_norm():
    tensors = [
        torch.ones(n, dtype=d) for n, d in ((4, torch.float32), (9, torch.float64))
    ]
    tensors.append(torch.ones(16))
    assert [n.item() for n in _torch.foreach_norm(tensors, 2.0)] == [2, 3, 4]
    assert _torch.foreach_norm([], 2.0) == []


# Stores.
def test_global_hooks():
    before = _torch.global_hooks()
    forward = nn.modules.module.register_module_forward_hook(lambda *args: None)
    step = register_optimizer_step_post_hook(lambda *args: None)
    assert {forward.id, step.id} == _torch.global_hooks().keys() - before.keys()
    forward.remove()
    step.remove()
    assert _torch.global_hooks() == before


def test_fake_store():
    assert isinstance(_torch.fake_store(), torch.distributed.Store)
    assert "fake" in torch.distributed.Backend.backend_list


def test_private_mesh():
    with _torch.private_mesh(4) as mesh:
        group = mesh.get_group()
        assert (group.size(), group.rank(), mesh.get_coordinate()) == (4, 0, (0,))
        with _torch.private_mesh(4) as again:
            assert again is mesh
        assert _torch.resolve_group(group.group_name) is group
    assert not torch.distributed.is_initialized()
    with pytest.raises(RuntimeError, match="Could not resolve the process group"):
        _torch.resolve_group(group.group_name)


def test_work_types():
    types = _torch.work_types()
    assert types[0] is torch.distributed.Work
    assert all("wait" in vars(kind) for kind in types)


def test_file_store(tmp_path):
    store = _torch.file_store(tmp_path / "store", 1)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert (tmp_path / "store").exists()


def test_keep_from_compiler():
    def kept(x):
        torch._dynamo.graph_break()
        return x + 1

    _torch.keep_from_compiler(kept)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.compile(kept, backend="eager")(torch.zeros(1)) == 1
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


# ----------------------------------------------------------------------------
# Private torch names that sharded parameters need; see tests/unit/test_torch_names.py.


def test_version_of():
    tensor = torch.zeros(2)
    before = _torch.version_of(tensor)
    tensor.detach().add_(1)
    assert _torch.version_of(tensor) == before + 1


def test_is_view():
    aten = torch.ops.aten
    assert _torch.is_view(aten.t.default)
    assert _torch.is_view(aten.slice.Tensor)
    assert not _torch.is_view(aten.mm.default)
    assert not _torch.is_view(len)


# ----------------------------------------------------------------------------
# Private torch names around recurrent layers; see test_torch_names.py.


def test_rnn_layer():
    x, state = torch.randn(3, 5, 4), torch.zeros(5, 4)
    weights = (*torch.randn(2, 16, 4), *torch.randn(2, 16))
    options = (False, [], 2, 4, 1, True, False, False, True)
    with torch.no_grad():
        out, _, _, kept = _torch.rnn_layer(x, *weights, state, state, *options)
    assert out.shape == (3, 5, 4)
    assert not kept.requires_grad
    assert kept.numel() > 0  # the plain kernel keeps nothing here


def test_keep_flat_weights():
    layer = nn.LSTM(4, 4)
    model, own = nn.Sequential(layer), list(layer.parameters())
    with _torch.keep_flat_weights([model]):
        layer.weight_ih_l0 = nn.Parameter(torch.zeros(16, 4))
        assert layer._flat_weights[0] is not own[0]
    assert layer._flat_weights[0] is own[0]
    assert layer._flat_weight_refs[0]() is own[0]


def test_renew_flat_weights():
    layer, new = nn.LSTM(4, 4), nn.Parameter(torch.zeros(16, 4))
    layer._parameters["weight_ih_l0"] = new
    _torch.renew_flat_weights([nn.Sequential(layer)])
    assert layer._flat_weights[0] is new
    assert layer._flat_weight_refs[0]() is new
    assert not layer._weights_have_changed()


# ----------------------------------------------------------------------------
# Private torch names for dataclasses in trees and for what optimizers note.


@dataclass(frozen=True)
class Pair:
    one: int
    two: int


def test_record_fields():
    assert list(_torch.record_fields(Pair(1, 2))) == [("one", 1), ("two", 2)]


def test_record():
    pair = Pair(1, 2)
    leaves, structure = _torch.flatten_tree([_torch.Record(pair, [1, [2, 3]])])
    assert leaves == [1, 2, 3]
    (made,) = _torch.unflatten_tree([4, 5, 6], structure)
    assert made == Pair(4, [5, 6])
    assert _torch.flatten_tree(pair)[0] == [pair]  # the user's class stays a leaf


def test_bookkeeping():
    parameter = torch.nn.Parameter(torch.ones(2))
    optim = torch.optim.SGD([parameter], fused=True)
    torch.optim.lr_scheduler.StepLR(optim, 1)
    before = dict(vars(optim))
    parameter.grad = torch.ones(2)
    optim.step()
    changed = {
        key for key, value in vars(optim).items() if before.get(key) is not value
    }
    assert {"_opt_called", "_need_device_dtype_check_for_fused"} <= changed
    assert changed <= {*_torch.OPTIMIZER_BOOKKEEPING, "state"}


# ----------------------------------------------------------------------------
# What torch says in schemas, as the legality check reads it.


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


# ----------------------------------------------------------------------------
# Private torch names about hooks; see tests/unit/test_torch_names.py.


def same(value):
    return None


def test_optimizer_hook_tables():
    optim = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    first, second = _torch.OPTIMIZER_HOOK_TABLES
    before = optim.register_step_pre_hook(print)
    after = optim.register_step_post_hook(print)
    assert list(_torch.hooks_of(optim, (first,))) == [(first, before.id, print)]
    assert list(_torch.hooks_of(optim, (second,))) == [(second, after.id, print)]


def test_hooks_of():
    parameter = nn.Parameter(torch.zeros(2))
    tables = _torch.GRADIENT_HOOK_TABLES
    assert list(_torch.hooks_of(parameter, tables)) == []
    before = parameter.register_hook(same)
    after = parameter.register_post_accumulate_grad_hook(same)
    assert list(_torch.hooks_of(parameter, tables)) == [
        (tables[0], before.id, same),
        (tables[1], after.id, same),
    ]


def test_gradient_hook_keys():
    tensors = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    assert _torch.gradient_hook_keys(tensors) == []
    before = tensors[1].register_hook(same)
    after = tensors[2].register_post_accumulate_grad_hook(same)
    keys = _torch.gradient_hook_keys(tensors)
    assert keys == [(1, (before.id,), ()), (2, (), (after.id,))]
    before.remove()
    after.remove()
    assert _torch.gradient_hook_keys(tensors) == []


def test_add_gradient_hook():
    one, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    seen = []
    one.register_hook(lambda gradient: seen.append("before"))
    one.register_post_accumulate_grad_hook(lambda tensor: seen.append("after"))
    for table, _, hook in _torch.hooks_of(one, _torch.GRADIENT_HOOK_TABLES):
        _torch.add_gradient_hook(other, table, hook)
    other.sum().backward()
    assert seen == ["before", "after"]


@pytest.mark.parametrize(("mode", "expected"), (("all", True), ("any", False)))
def test_waits_for_nodes(mode, expected):
    parameter = nn.Parameter(torch.zeros(2))
    register_multi_grad_hook([parameter], same, mode=mode)
    ((_, _, hook),) = _torch.hooks_of(parameter, _torch.GRADIENT_HOOK_TABLES)
    assert _torch.waits_for_nodes(hook) is expected
    assert not _torch.waits_for_nodes(same)
    assert not _torch.waits_for_nodes(_torch.LaysOutGradient())


# ----------------------------------------------------------------------------
# Private names of torch behind in-place forms, loss scaling and backward contexts.


def test_binding_of():
    with FakeTensorMode():
        x, sizes = torch.empty(4, 2), [2, 4]
    found = _torch.binding_of(aten.view.default, (x, sizes), {})
    assert found == _torch.Binding("view", unpacks=True)
    assert found.function(torch.ones(4, 2), *sizes).shape == (2, 4)
    item = _torch.binding_of(aten._local_scalar_dense.default, (x,), {})
    called = []

    class Calls(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **(kwargs or {}))

    one = torch.ones(())
    with Calls():
        assert item.function(one) == 1.0
    assert called == [aten._local_scalar_dense.default]


def test_in_place_form():
    assert _torch.in_place_form(aten.add.Tensor) is aten.add_.Tensor
    assert _torch.in_place_form(aten.lerp.Scalar) is aten.lerp_.Scalar
    assert _torch.in_place_form(aten.copy.default) is aten.copy_.default
    assert _torch.in_place_form(aten._foreach_mul.Scalar) is aten._foreach_mul_.Scalar
    fused = _torch.in_place_form(aten._fused_adamw.tensor_lr)
    assert fused is aten._fused_adamw_.tensor_lr
    for other in (aten.add_.Tensor, aten.mm.default, aten.cumsum.default, len, None):
        assert _torch.in_place_form(other) is None


def test_written_arguments():
    assert _torch.written_arguments(aten.add_.Tensor) == (0,)
    assert _torch.written_arguments(aten.add.Tensor) == ()
    assert _torch.written_arguments(aten._fused_adam_.default) == (0, 1, 2, 3, 4)
    assert _torch.written_arguments(len) == ()


def test_written_values():
    assert _torch.written_values(aten.add_.Tensor, ("x", "y"), {}) == ["x"]
    assert _torch.written_values(aten.add.out, ("x", "y"), {"out": "z"}) == ["z"]
    assert _torch.written_values(aten.add.out, ("x", "y"), {}) == [None]
    assert _torch.written_values(len, ("x",), {}) == []


def test_shared_arguments():
    assert _torch.shared_arguments(aten.t.default) == (0,)
    assert _torch.shared_arguments(aten.split.Tensor) == (0,)
    assert _torch.shared_arguments(aten._unsafe_view.default) == (0,)
    wait = torch.ops._c10d_functional.wait_tensor.default
    assert _torch.shared_arguments(wait) == (0,)
    assert _torch.shared_arguments(aten.add.Tensor) == ()
    values, indices = 4, 5
    assert _torch.shared_arguments(aten.sort.values_stable) == (values, indices)
    assert _torch.shared_arguments(aten.sort.values_stable, 1) == (indices,)
    assert _torch.shared_arguments(aten.native_dropout.default, 0) == (0,)
    assert _torch.shared_arguments(aten.native_dropout.default, 1) == ()
    assert _torch.shared_arguments(aten.split.Tensor, 3) == (0,)


def test_gives_one_tensor():
    assert _torch.gives_one_tensor(aten.relu.default)
    for several in (aten.split.Tensor, aten.native_dropout.default):
        assert not _torch.gives_one_tensor(several)
    assert not _torch.gives_one_tensor(aten._foreach_add_.List)  # gives nothing


def test_tensor_methods():
    assert _torch.tensor_methods("t") == (aten.t.default,)
    assert aten.view.default in _torch.tensor_methods("view")
    for other in ("name", "no_such_method", "arange"):
        assert _torch.tensor_methods(other) == ()


def test_silent_views_really_share_memory():
    x = torch.ones(4, 4)
    assert aten._unsafe_view(x, [16]).data_ptr() == x.data_ptr()
    assert aten.unsafe_split(x, 2)[0].data_ptr() == x.data_ptr()
    assert aten.unsafe_split_with_sizes(x, [2, 2])[0].data_ptr() == x.data_ptr()
    assert aten.conj_physical(x).data_ptr() == x.data_ptr()
    assert aten.lift(x).data_ptr() == x.data_ptr()
    assert aten.relu(x).data_ptr() != x.data_ptr()


def test_storage_bytes():
    assert _torch.storage_bytes(torch.ones(8)[2:4]) == 32


def test_scaler_tensors():
    scaler = GradScaler("cpu")
    tensors = _torch.scaler_tensors(scaler, torch.device("cpu"))
    assert [t.item() for t in tensors.values()] == [65536.0, 0]
    assert set(tensors) <= set(vars(scaler))
    off = GradScaler("cpu", enabled=False)
    assert _torch.scaler_tensors(off, torch.device("cpu")) == {}


def test_scaler_facts():
    scaler = GradScaler("cpu", growth_interval=5)
    assert _torch.scaler_facts(scaler) == ("GradScaler", True, 2.0, 0.5, 5)


def test_choosing_steps():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu")
    calls = []
    with _torch.choosing_steps(scaler, lambda *args: calls.append(args)) as is_updated:
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        assert not is_updated()
        scaler.update()
        assert is_updated()
    ((stepped, found, make),) = calls
    assert stepped is optimizer and found.item() == 0.0
    assert parameter.tolist() == [1, 1]
    make()
    assert parameter.tolist() == [0, 0]
    assert "_maybe_opt_step" not in vars(scaler)


def test_backward_under():
    seen = []

    class Names(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def region(x):
        return x.sin().relu()

    leaf = torch.ones(2, requires_grad=True)
    with Names() as mode:
        out = torch.utils.checkpoint.checkpoint(region, leaf, use_reentrant=False).sum()
        with _torch.backward_under(mode):
            out.backward()
    assert seen.count("sin") == 2  # the recomputation is seen too


def test_hook_tables():
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(print)
    module.register_forward_hook(print)
    module.register_full_backward_pre_hook(print)
    module.register_full_backward_hook(print)
    for name in _torch.HOOK_TABLES:
        assert len(getattr(module, name)) == 1


def test_is_pointwise():
    names = ("aten.exp_.default", "aten.add.Tensor", "aten.mm.default", "own::op")
    assert list(map(_torch.is_pointwise, names)) == [True, True, False, False]


def test_reduction_in_place():
    functional = torch.ops._c10d_functional
    form = _torch.reduction_in_place(functional.all_reduce.default)
    assert form is functional.all_reduce_.default
    assert _torch.written_arguments(form) == (0,)
    for other in (functional.reduce_scatter_tensor.default, aten.add.Tensor, None):
        assert _torch.reduction_in_place(other) is None


# ----------------------------------------------------------------------------
# Private torch names behind numbers that an optimizer reads and chooses by.


def traced(function, *inputs):
    world = _torch.FakeWorld()
    fakes = [world.fake(each) for each in inputs]
    with world.mode, world.reading_values(), torch.no_grad():
        return _torch.trace(lambda *args: function(world, *args), fakes), world


def test_plain_for():
    seen = []

    def step(world, x):
        number = world.number("lr", 2.0)
        for answer in (True, False):
            with _torch.numbers.plain_for(lambda frame, answer=answer: answer):
                seen.append((isinstance(number, float), str(number), number // 0.4))
        return x * number

    _, world = traced(step, torch.ones(2))
    assert seen[0] == (True, "2.0", 4.0)
    assert seen[1][0] is False and seen[1][2] == 4.0
    assert len(world.assumptions()) == 1
    assert "__format__" not in vars(torch.SymFloat)


def test_real_tensors():
    seen = []

    def step(world, x):
        with _torch.numbers.real_tensors():
            value = torch.ones(()) + 1
        seen.append((type(value), value.item(), value.requires_grad))
        return x + 1

    graph, _ = traced(step, torch.ones(2))
    assert seen == [(torch.Tensor, 2.0, False)]
    assert [n.name for n in graph.graph.nodes if n.op == "call_function"] == ["add"]


def test_stand_in_and_same_number():
    def step(world, x, y):
        first = world.number("count", 3.0)
        second = world.same_number(first)
        _torch.numbers.stand_in(first, x.item())
        _torch.numbers.stand_in(second, y.item())
        assert _torch.symbol_of(first) == _torch.symbol_of(second)
        return torch.ones(()) * (first + 1 if first > 2 else 0), x * (second + 1)

    graph, world = traced(step, torch.ones(()), torch.ones(()))
    (assumption,) = world.assumptions()
    assert len(assumption.free_symbols) == 1
    # Each is its own node, with the values of the run.
    got = graph(torch.tensor(5.0), torch.tensor(6.0))
    assert [each.item() for each in got] == [6.0, 35.0]


def test_same_number_of_an_integer():
    world = _torch.FakeWorld()
    number = world.number("count", 3)
    assert isinstance(world.same_number(number), torch.SymInt)


def test_copy_number():
    def step(world, x):
        return x * (x.item() + 1)

    graph, _ = traced(step, torch.ones(()))
    (add,) = graph.graph.find_nodes(op="call_function", target=operator.add)

    def again(world, x):
        return x * _torch.numbers.copy_number(add, (x.item(), 2))

    copied, _ = traced(again, torch.ones(()))
    assert copied(torch.tensor(3.0)).item() == 15.0


@pytest.mark.parametrize("choose", [max, min])
def test_extreme(choose):
    def step(world, x):
        return x * choose_in_graph(1.0, x.item())

    def choose_in_graph(first, second):
        return _torch.numbers.extreme(choose, first, second)

    graph, world = traced(step, torch.ones(()))
    assert not world.assumptions()
    for value in (0.5, 2.0):
        assert graph(torch.tensor(value)).item() == value * choose(1.0, value)
    (node,) = graph.graph.find_nodes(op="call_function", target=choose)
    assert node.args[0] == 1.0  # the order matters for NaN
    assert choose(1.0, math.nan) == 1.0
    assert choose_in_graph(2, 3) == choose(2, 3)


def test_extremes_in_graph():
    for module in (_adafactor, asgd):
        assert "max(" in inspect.getsource(module)
        assert "max" not in vars(module) and "min" not in vars(module)
    with _torch.numbers.extremes_in_graph():
        assert _adafactor.max(1, 2) == asgd.max(1, 2) == 2
        assert _adafactor.min(1, 2) == 1
    assert "max" not in vars(asgd) and "min" not in vars(_adafactor)


def test_math_in_graph():
    def step(x, number):
        return [x * getattr(math, name)(number * 0.25) for name in names]

    names, own, x = (
        _torch.numbers._OF_MATH,
        math.sqrt,
        torch.ones((), dtype=torch.double),
    )
    world = _torch.FakeWorld()
    with _torch.numbers.math_in_graph(), world.mode:
        assert math.sqrt(4) == 2.0
        graph = _torch.trace(step, [world.fake(x), world.number("n", 3.0)])
    assert math.sqrt is own and not world.assumptions()
    for number in (2.0, 3.0):
        wanted = [getattr(math, name)(number * 0.25) for name in names]
        assert [each.item() for each in graph(x, number)] == wanted


OPTIONS = {"weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0}
FLAGS = {"nesterov": False, "maximize": False, "is_first_step": False}


def test_fused_sgd_has_a_kernel_while_tracing():
    def step(world, x, y, rate):
        for lr in (0.1, rate):
            torch._fused_sgd_([x], [y], [x.clone()], lr=lr, **OPTIONS, **FLAGS)
        return x

    names = ("aten::_fused_sgd_", "aten::_fused_sgd_.tensor_lr")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    before = [has_kernel(name, "Meta") for name in names]
    graph, _ = traced(step, torch.ones(2), torch.ones(2), torch.ones(()))
    nodes = [n.target for n in graph.graph.nodes if "_fused_sgd_" in n.name]
    packet = torch.ops.aten._fused_sgd
    assert all(map(_torch.is_fused_optimizer, nodes))
    forms = [_torch.functional_form(target).operator for target in nodes]
    assert forms == [packet.default, packet.tensor_lr]
    assert [has_kernel(name, "Meta") for name in names] == before


def test_functional_form():
    aten = torch.ops.aten
    assert _torch.functional_form(aten.add_.Tensor) == (aten.add.Tensor, 0, 1)
    assert _torch.functional_form(aten._foreach_mul_.Scalar) == (
        (aten._foreach_mul.Scalar, 0, 1)
    )
    norm = _torch.functional_form(aten._native_batch_norm_legit.default)
    assert norm == (aten._native_batch_norm_legit_functional.default, 3, 5)
    assert _torch.functional_form(aten.add.out) is None
    assert _torch.functional_form(aten.bernoulli_.float) is None  # draws


def test_is_fused_optimizer():
    assert _torch.is_fused_optimizer(torch.ops.aten._fused_adam_.default)
    assert not _torch.is_fused_optimizer(torch.ops.aten.add_.Tensor)


def test_is_elementwise():
    aten = torch.ops.aten
    assert _torch.is_elementwise(aten.mul_.Tensor)
    assert _torch.is_elementwise(aten._foreach_mul_.Scalar)
    assert not _torch.is_elementwise(aten.index_put_.default)
    assert not _torch.is_elementwise(len)


def test_initial_state():
    parameter = nn.Parameter(torch.randn(2, 3))
    made = _torch.initial_state(
        optim := torch.optim.Adam([parameter]), optim.param_groups[0], parameter
    )
    assert list(made) == ["step", "exp_avg", "exp_avg_sq"]
    assert not any(each.any() for each in made.values())
    assert parameter.grad is None and not optim.state
    other = torch.optim.LBFGS([parameter])
    assert _torch.initial_state(other, other.param_groups[0], parameter) == {}


def test_fake_results_of_equal_calls_are_computed_once():
    aten = torch.ops.aten
    with FakeTensorMode():
        first, second, third = torch.empty(2, 3), torch.empty(2, 3), torch.empty(3, 2)
    made = _torch.fake_result(aten.relu.default, (first,))
    assert _torch.fake_result(aten.relu.default, (second,)) is made
    assert _torch.fake_result(aten.relu.default, (third,)).shape == (3, 2)
    assert _torch.fake_result(aten.relu_.default, (first,)).shape == (2, 3)


def test_lazy_module():
    graph = fx.symbolic_trace(lambda x: x + 1).graph
    module = _torch.lazy_module(nn.Module(), graph)
    assert isinstance(module, fx.GraphModule)
    assert module(torch.ones(())).item() == 2.0
    assert "x + 1" in module.code


def test_without_autocast():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with _torch.without_autocast():
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16


# ----------------------------------------------------------------------------
# Private torch names that passes need to add nodes; see tests/unit/test_torch_names.py.


def test_operators():
    for op, name in (
        (_torch.ALL_REDUCE, "all_reduce"),
        (_torch.ALL_GATHER, "all_gather_into_tensor"),
        (_torch.REDUCE_SCATTER, "reduce_scatter_tensor"),
        (_torch.WAIT, "wait_tensor"),
    ):
        assert _torch.packet_name(op) == f"_c10d_functional::{name}"


@pytest.mark.parametrize("make", [_torch.FakeWorld().fake, lambda t: t.to("meta")])
def test_fake_result(make):
    whole, number = make(torch.ones(8, 3).bfloat16()), make(torch.ones(()))
    with CommDebugMode() as mode:
        for target, args, shape in (
            (_torch.ALL_REDUCE, (whole.t(), "sum", "0"), (3, 8)),
            (_torch.ALL_GATHER, (whole, 4, "0"), (32, 3)),
            (_torch.REDUCE_SCATTER, (whole, "sum", 4, "0"), (2, 3)),
            (_torch.WAIT, (whole,), (8, 3)),
            (torch.ops.aten.cat.default, ([whole, whole], 1), (8, 6)),
        ):
            made = _torch.fake_result(target, args)
            assert made.shape == shape and made.dtype == torch.bfloat16
            assert _torch.is_fake(made)
        assert mode.get_total_counts() == 0
    pieces = _torch.fake_result(torch.ops.aten.split.Tensor, (whole, 4))
    assert _torch.fake_result(operator.getitem, (pieces, 1)).shape == (4, 3)
    assert not _torch.fake_result(torch.ops.aten.neg.default, (number,)).requires_grad


# ----------------------------------------------------------------------------
# The private names of torch that plans use, on the installed torch.


def test_has_forward_hooks():
    module = nn.Linear(2, 2)
    assert not _torch.has_forward_hooks(module)
    handle = module.register_forward_hook(lambda *_: None)
    assert _torch.has_forward_hooks(module)
    handle.remove()
    module.register_forward_pre_hook(lambda *_: None)
    assert _torch.has_forward_hooks(module)


# ----------------------------------------------------------------------------
# The private name of torch behind the memory figures of a lock.


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storage_key(device):
    tensor, other = torch.empty(4, device=device), torch.empty(4, device=device)
    assert _torch.storage_key(tensor) == _torch.storage_key(tensor[1:].detach())
    assert _torch.storage_key(tensor) != _torch.storage_key(other)


def test_without_rnn_kernels():
    layer, x = torch.nn.LSTM(3, 3), torch.ones(2, 1, 3)
    before = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled
    with _torch.without_rnn_kernels(), CountCalls() as seen:
        layer(x)
    assert "aten::mkldnn_rnn_layer" not in seen.names
    assert before == (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled)


class CountCalls(_torch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_on_lists():
    tensors = [torch.ones(2), torch.ones(3)]
    _torch.on_lists("add_")(tensors, 2.0)
    assert [t.tolist() for t in tensors] == [[3.0, 3.0], [3.0, 3.0, 3.0]]


def test_asked_device():
    device = torch.ops.prim.device.default
    with FakeTensorMode():
        fake = torch.empty(3)
    assert _torch.asked_device(device, [fake]) == torch.device("cpu")
    assert _torch.asked_device(device, [torch.empty(3)]) is None
    assert _torch.asked_device(torch.ops.aten.relu.default, [fake]) is None


def test_set_arguments():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    node = graph.call_function(torch.add, (x,), {"other": x})
    _torch.set_arguments(node, (y,), {"other": y})
    assert node.args == (y,) and node.kwargs == {"other": y}
    assert not x.users and list(y.users) == [node]


def test_form_check():
    parameter, state = nn.Parameter(torch.ones(2, 3)), torch.ones(1, 3)
    tensors = [parameter, state]
    holds = _torch.form_check(tensors)
    before = parameter.data
    changes = [
        lambda: parameter.requires_grad_(False),
        lambda: setattr(parameter, "data", before.double()),
        lambda: setattr(parameter, "data", before.reshape(3, 2)),
        lambda: setattr(parameter, "data", before.as_strided((2, 3), (1, 2))),
        lambda: setattr(parameter, "data", before[:1]),
        lambda: state.as_strided_((1, 3), (7, 1)),
        lambda: tensors.__setitem__(1, nn.Parameter(state, requires_grad=False)),
        lambda: tensors.__setitem__(1, state.to("meta")),
    ]
    for change in changes:
        assert holds(tensors)
        change()
        assert not holds(tensors)
        tensors[1] = state.as_strided_((1, 3), (3, 1))
        parameter.requires_grad_(True)
        parameter.data = before
    with torch.no_grad():
        assert holds(tensors)


def test_keeping_names():
    """A copy has the names of the original, and gives new nodes those that fx would."""

    def fill(graph, copying):
        names = ["x", "x_7", "x_2", "_1", "a_b_3", "a_b", "a_b_4", "y_", "abs_1"]
        with copying(graph):
            for name in names:
                graph.create_node("placeholder", "x", name=name)
        return names + [
            graph.create_node("placeholder", "x", name=name).name
            for name in (*names, "a_b_9", "abs", "a_b", "_")
        ]

    copied, plain = fx.Graph(), fx.Graph()
    names = fill(copied, _torch.keeping_names)
    assert names == fill(plain, contextlib.nullcontext)
    assert [node.name for node in copied.nodes] == names


def test_operator_of_unknown_size():
    with FakeTensorMode(), pytest.raises(_torch.data_dependence_errors()) as caught:
        torch.ones(3, dtype=torch.long).bincount()
    outer = RuntimeError()
    outer.__cause__ = caught.value
    assert _torch.operator_of_unknown_size(outer) == "aten.bincount.default"
    assert _torch.operator_of_unknown_size(RuntimeError()) is None


def test_layouts_by_value():
    from torch._subclasses.fake_tensor import FakeTensorMode

    part = _torch.strided_shard(0, 2)
    with _torch.layouts_by_value(), FakeTensorMode():
        size, first = part.local_shard_size_and_offset(8, 2, 1)[:2]
    assert (size, first) == (4, 2)


def traced_with_sizes():
    world = _torch.FakeWorld()
    x = world.fake_batch(torch.ones(2, 7, 4), "x", (2, 5, 4), {1})

    def run(x):
        return [x.flatten(0, 1).sum(0) * x.shape[1]]

    with world.mode:
        graph = _torch.trace(run, [x])
    return world, x, graph


def test_sizes_from_inputs():
    world, x, graph = traced_with_sizes()
    symbol = _torch.symbol_of(x.shape[1])
    place = graph.graph.find_nodes(op="placeholder")[0]
    _torch.sizes_from_inputs(graph.graph, {symbol: (place, 1)})
    graph.recompile()
    values = [node.meta["val"] for node in graph.graph.nodes if "val" in node.meta]
    kinds = {type(value) for value in values if not isinstance(value, torch.Tensor)}
    assert kinds <= {int, list}
    sizes = graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.sym_size.int
    )
    assert [node.args for node in sizes] == [(place, 1)]
    assert graph(torch.ones(2, 9, 4))[0].tolist() == [162.0] * 4
    assert [str(each) for each in world.ranges([symbol])] == [f"{symbol} >= 2"]


def test_is_symbol():
    _, x, _ = traced_with_sizes()
    size = x.shape[1]
    assert _torch.is_symbol(size)
    assert size == 5  # from here on
    assert not _torch.is_symbol(size)
    assert not _torch.is_symbol(5)


def test_propagate_shapes():
    _, _, graph = traced_with_sizes()
    shapes = _torch.propagate_shapes(graph, [torch.ones(2, 3, 4)])
    views = graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.view.default
    )
    assert shapes[views[0]] == [6, 4]


def test_shapes_of():
    assert _torch.shapes_of([torch.ones(2, 3), 4]) == [[2, 3], ()]


# ----------------------------------------------------------------------------
# Fake tensors that the mode of a capture makes itself, and remembers.


def layout_of(value):
    form = value.dtype, value.device, value.shape, value.stride()
    return (
        *form,
        value.storage_offset(),
        value.is_conj(),
        value.untyped_storage().nbytes(),
    )


def answers(mode, make):
    """What operators give on fake tensors, the second time they are asked."""
    with mode:
        for _ in range(2):
            x = make(torch.randn(6, 4))
            part, whole = make(torch.randn(8, 4)[2:]), make(torch.randn(6, 4).cfloat())
            found = [
                x.as_strided((2, 2), (4, 1), 1),
                part.as_strided((2, 2), (4, 1), 1),
                whole.conj(),
                whole.conj() + 1,
                *x.split(3),
                x + 1.5,
                x.long() + 1.5,
                x.add_(1),
                torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5)[1],
            ]
    return [layout_of(each) for each in found]


def test_operators_give_on_fake_tensors_what_torch_says():
    plain = FakeTensorMode()
    mode = _torch.FakeWorld().mode
    expected = answers(plain, plain.from_tensor)
    assert answers(mode, mode.from_tensor) == expected
    world = _torch.FakeWorld()
    assert answers(world.mode, world.fake) == expected


def test_fake_tensors_of_two_captures_are_told_apart():
    one, other = _torch.FakeWorld(), _torch.FakeWorld()
    x, y = one.fake(torch.ones(3)), other.fake(torch.ones(3))
    with one.mode:
        assert (x + x).shape == (3,)
        with pytest.raises(AssertionError, match=r"[Mm]ixing fake modes"):
            y + y


def test_sizes_that_are_symbols_are_never_remembered():
    world = _torch.FakeWorld()
    x = world.fake_batch(torch.ones(4, 3), "x", (4, 3), {0})
    with world.mode:
        for _ in range(2):
            assert isinstance((x + 1).shape[0], torch.SymInt)


def test_fake_tensors_share_memory_as_real_ones_do():
    world = _torch.FakeWorld()
    base = torch.randn(4, 6)
    whole, part, other = map(world.fake, (base, base[1:, ::2], base.clone()))
    assert layout_of(part) == (
        *(torch.float32, torch.device("cpu"), (3, 3), (6, 2), 6, False, 96),
    )
    memory = [each.untyped_storage()._cdata for each in (whole, part, other)]
    assert memory[0] == memory[1] != memory[2]
    assert not whole.requires_grad and whole.grad_fn is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3).to_sparse(),
        torch.ones(2, dtype=torch.cfloat).conj(),
        nn.Parameter(torch.ones(2)),
        torch.empty(0),
    ],
    ids=["sparse", "conjugate", "parameter", "empty"],
)
def test_fake_tensors_of_any_kind_are_like_torchs(tensor):
    expected = FakeTensorMode().from_tensor(tensor.detach()).detach()
    made = _torch.FakeWorld().fake(tensor)
    assert type(made) is type(expected)
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    assert (made.layout, made.is_conj()) == (expected.layout, expected.is_conj())
    assert vars(made).keys() == vars(expected).keys()


def test_values_of_traced_nodes_are_snapshots():
    def step(world, x):
        y = x.t()
        return y.add_(1) + 1

    graph, _ = traced(step, torch.ones(2, 3))
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if value is not None:
            assert type(value) is FakeTensor and value.grad_fn is None
            assert value.fake_mode is not None and value.shape in ((2, 3), (3, 2))


def test_flex_attention_by():
    calls = []

    def kernel(query, *others):
        calls.append(len(others))
        sums = query.new_zeros(query.shape[:-1])
        return query, sums, sums

    x = torch.zeros(1, 2, 128, 16)
    with _torch.flex_attention_by(kernel):
        assert flex_attention(x, x, x) is x
    assert calls == [6]  # keys, values, scores, blocks, scale, options


# ----------------------------------------------------------------------------
# What a rehearsal replaces, and makes of other tensors.


def test_constructors_are_those_of_a_default_device():
    from torch.utils._device import _device_constructors

    assert {torch.empty, torch.rand, torch.tensor} <= set(_device_constructors())


def test_tensors_can_be_exchanged_that_a_graph_holds():
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(3))
    held = one * 2
    torch._C._swap_tensor_impl(one, other)
    assert (one.shape, other.shape, held.shape) == ((3,), (2,), (2,))


def test_ragged_sizes_are_numbered():
    from torch.nested._internal.nested_int import NestedIntNode

    one, same, other = (torch.SymInt(NestedIntNode(n, 1)) for n in (7, 7, 8))
    assert one == same
    assert one != other
    assert callable(FakeTensor.get_nested_int)


def test_fake_tensors_can_do_without_kernels_of_the_host():
    from torch._subclasses import fake_tensor

    with FakeTensorMode(allow_fallback_kernels=False):
        with pytest.raises(
            (fake_tensor.UnsupportedOperatorException, NotImplementedError)
        ):
            torch._sample_dirichlet(torch.ones(3))
        with pytest.raises(fake_tensor.DataDependentOutputException):
            torch.allclose(torch.ones(2), torch.ones(2))
