"""What a communication is: kinds, events, the ledger, its file and its difference."""

from torchspmd.comm.diff import Change as Change
from torchspmd.comm.diff import diff_ledgers as diff_ledgers
from torchspmd.comm.event import GLOBAL as GLOBAL
from torchspmd.comm.event import CommEvent as CommEvent
from torchspmd.comm.event import Group as Group
from torchspmd.comm.event import Phase as Phase
from torchspmd.comm.event import is_check as is_check
from torchspmd.comm.event import marked_as_check as marked_as_check
from torchspmd.comm.kinds import Kind as Kind
from torchspmd.comm.kinds import Operator as Operator
from torchspmd.comm.kinds import find_operator as find_operator
from torchspmd.comm.ledger import Key as Key
from torchspmd.comm.ledger import Ledger as Ledger
from torchspmd.comm.ledger import Total as Total
from torchspmd.comm.ledger import is_within as is_within
from torchspmd.comm.measure import Measure as Measure
from torchspmd.comm.measure import measure as measure
from torchspmd.comm.storage import ledger_from_dict as ledger_from_dict
from torchspmd.comm.storage import ledger_to_dict as ledger_to_dict
from torchspmd.comm.storage import load_ledger as load_ledger
from torchspmd.comm.storage import save_ledger as save_ledger
from torchspmd.comm.topology import Topology as Topology
from torchspmd.comm.topology import describe_group as describe_group
from torchspmd.comm.units import format_bytes as format_bytes
from torchspmd.comm.wire import wire_bytes as wire_bytes
