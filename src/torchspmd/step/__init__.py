"""The whole training step as one program: capture it, look at it, run it."""

from torchspmd.step.api import compile as compile
from torchspmd.step.capture.modes import DataParallel as DataParallel
from torchspmd.step.capture.override import Override as Override
from torchspmd.step.compiled import CompiledStep as CompiledStep
from torchspmd.step.exposure import measure_exposure as measure_exposure
from torchspmd.step.graph.cost import CostModel as CostModel
from torchspmd.step.graph.exposure_report import ExposureReport as ExposureReport
from torchspmd.step.graph.exposure_report import MeasuredExposure as MeasuredExposure
from torchspmd.step.graph.ledger import build_ledger as build_ledger
from torchspmd.step.graph.optimizer_blocks import (
    get_all_fused_optimizer_blocks as get_all_fused_optimizer_blocks,
)
from torchspmd.step.graph.queries import find_all_descendants as find_all_descendants
from torchspmd.step.graph.queries import find_node as find_node
from torchspmd.step.graph.reports import Outcome as Outcome
from torchspmd.step.graph.reports import PassReport as PassReport
from torchspmd.step.iterate.iteration import IterGraphModule as IterGraphModule
from torchspmd.step.measured_cost import measure_cost as measure_cost
from torchspmd.step.passes.ordering import (
    graph_optimization_pass as graph_optimization_pass,
)
from torchspmd.step.passes.ordering import pass_reports as pass_reports
from torchspmd.step.program import Program as Program
from torchspmd.step.transformation import (
    GraphModuleTransformation as GraphModuleTransformation,
)
from torchspmd.step.virtual.options import Verification as Verification
from torchspmd.step.virtual.run import VirtualRanks as VirtualRanks
from torchspmd.step.virtual.run import run_virtual as run_virtual
