"""A reduction may be dropped where its group is one rank, and nowhere else."""

import pytest
import torch
from torch import fx

from torchspmd.errors import LegalityError
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.legality.check import check_edit
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake

ops = torch.ops._c10d_functional


def without_its_reduction():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, device="meta")
    start = graph.call_function(ops.all_reduce.default, (x, "sum", "0"))
    wait = graph.call_function(ops.wait_tensor.default, (start,))
    graph.output([wait])
    before, mapping = copy_graph(graph)
    wait.replace_all_uses_with(x)
    graph.erase_node(wait)
    graph.erase_node(start)
    return str(check_edit(before, graph, mapping))


def test_a_group_of_one():
    with fake_mesh(1, ("dp",)):
        assert without_its_reduction() == "proved equal"


def test_a_group_of_two():
    with (
        fake_mesh(2, ("dp",)),
        pytest.raises(LegalityError, match="all_reduce_default was where x is now"),
    ):
        without_its_reduction()
