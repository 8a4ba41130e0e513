"""Lay a model over a mesh, see every byte it sends, prove it right, run it as one graph."""

from torchspmd.comm import CommEvent as CommEvent
from torchspmd.comm import Kind as Kind
from torchspmd.comm import Ledger as Ledger
from torchspmd.comm import Phase as Phase
from torchspmd.comm import diff_ledgers as diff_ledgers
from torchspmd.comm import load_ledger as load_ledger
from torchspmd.comm import save_ledger as save_ledger
from torchspmd.errors import SpmdError as SpmdError
from torchspmd.local import local_map as local_map
from torchspmd.parallel import Plan as Plan
from torchspmd.parallel import auto_plan as auto_plan
from torchspmd.parallel import clip_grad_norm_ as clip_grad_norm_
from torchspmd.parallel import parallelize_module as parallelize_module
from torchspmd.step import DataParallel as DataParallel
from torchspmd.step import GraphModuleTransformation as GraphModuleTransformation
from torchspmd.step import IterGraphModule as IterGraphModule
from torchspmd.step import compile as compile
from torchspmd.step import run_virtual as run_virtual
from torchspmd.trace import CommDebugMode as CommDebugMode
from torchspmd.verify import check_parity as check_parity
from torchspmd.verify import expect as expect

__version__ = "0.1.0"
