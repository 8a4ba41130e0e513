"""What rehearsals import, for the process that candidates of a search are forked from.

There it is imported once. In each candidate's process it would take as long as the
rehearsal of a few blocks.
"""

import gc

import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.nn.attention
import torch.nn.utils
import torch.utils.checkpoint  # noqa: F401

from torchspmd._torch.compilation import load_compiler

load_compiler()
gc.freeze()  # candidates do not look through all of torch for garbage
