"""Each private torch name that torchspmd uses, on the installed torch.

Those that need a process group are tested in tests/fake/test_torch_names_fake.py.
"""

import ast
import copy
import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from torchspmd import _torch
from torchspmd._torch import LANDMARKS, Landmark
from torchspmd.testing import fake_world

pytestmark = pytest.mark.unit

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


def test_every_exported_name_has_a_docstring():
    undocumented = [n for n in _exported_functions() if not getattr(_torch, n).__doc__]
    assert undocumented == []


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
    torch.fx.GraphModule({}, graph)()
    assert seen == nodes
    look()
    assert seen[-1] is None


def test_is_first_ddp_step():
    with fake_world(2):
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert _torch.is_first_ddp_step(model)
        model(torch.ones(1, 2)).sum().backward()
        assert not _torch.is_first_ddp_step(model)
    assert not _torch.is_first_ddp_step(nn.Linear(2, 2))


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


def test_foreach_norm():
    tensors = [
        torch.ones(n, dtype=d) for n, d in ((4, torch.float32), (9, torch.float64))
    ]
    tensors.append(torch.ones(16))
    assert [n.item() for n in _torch.foreach_norm(tensors, 2.0)] == [2, 3, 4]
    assert _torch.foreach_norm([], 2.0) == []


# Stores.


def test_fake_store():
    assert isinstance(_torch.fake_store(), torch.distributed.Store)
    assert "fake" in torch.distributed.Backend.backend_list


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
