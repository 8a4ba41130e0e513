"""The whole training step as one program: capture it, look at it, run it."""

from torchspmd.step.api import compile
from torchspmd.step.capture.override import Override
from torchspmd.step.compiled import CompiledStep
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.graph.collectives import build_ledger
from torchspmd.step.graph.cost import CostModel, Link
from torchspmd.step.graph.nodes import find_all_descendants, find_node
from torchspmd.step.graph.optimizer_lists import get_all_fused_optimizer_blocks
from torchspmd.step.graph.reports import Outcome, PassReport
from torchspmd.step.measure.exposure import measure_exposure
from torchspmd.step.measure.exposure_report import ExposureReport, MeasuredExposure
from torchspmd.step.measure.operators import measure_cost
from torchspmd.step.modes.data_parallel import DataParallel
from torchspmd.step.passes.pipeline import GraphModuleTransformation
from torchspmd.step.passes.runner import graph_optimization_pass, pass_reports
from torchspmd.step.program import ClosedProgram, Program
from torchspmd.step.virtual.run import VirtualRanks, run_virtual
from torchspmd.step.virtual.verify import Verification

__all__ = [
    "ClosedProgram",
    "CompiledStep",
    "CostModel",
    "DataParallel",
    "ExposureReport",
    "GraphModuleTransformation",
    "IterGraphModule",
    "Link",
    "MeasuredExposure",
    "Outcome",
    "Override",
    "PassReport",
    "Program",
    "Verification",
    "VirtualRanks",
    "build_ledger",
    "compile",
    "find_all_descendants",
    "find_node",
    "get_all_fused_optimizer_blocks",
    "graph_optimization_pass",
    "measure_cost",
    "measure_exposure",
    "pass_reports",
    "run_virtual",
]
