"""The whole training step as one program: capture it, look at it, run it."""

from torchspmd.step.api import compile as compile
from torchspmd.step.compiled import CompiledStep as CompiledStep
from torchspmd.step.graph_ledger import build_ledger as build_ledger
from torchspmd.step.graph_queries import find_all_descendants as find_all_descendants
from torchspmd.step.graph_queries import find_node as find_node
from torchspmd.step.iteration import IterGraphModule as IterGraphModule
from torchspmd.step.modes import DataParallel as DataParallel
from torchspmd.step.optimizer_blocks import (
    get_all_fused_optimizer_blocks as get_all_fused_optimizer_blocks,
)
from torchspmd.step.ordering import graph_optimization_pass as graph_optimization_pass
from torchspmd.step.program import Program as Program
from torchspmd.step.transformation import (
    GraphModuleTransformation as GraphModuleTransformation,
)
