"""Every private torch name and version-dependent fact that torchspmd rests on.

No other package may touch ``torch._*`` or a private module of torch;
``tests/unit/test_torch_names.py`` checks each name here on the installed version. One file
for each area; this page lists what the rest of torchspmd may use.
"""

from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from torchspmd._torch import numbers as numbers
from torchspmd._torch.autograd import ACCUMULATE_SEQUENCE as ACCUMULATE_SEQUENCE
from torchspmd._torch.autograd import GRADIENT_HOOK_TABLES as GRADIENT_HOOK_TABLES
from torchspmd._torch.autograd import HOOK_TABLES as HOOK_TABLES
from torchspmd._torch.autograd import OPTIMIZER_BOOKKEEPING as OPTIMIZER_BOOKKEEPING
from torchspmd._torch.autograd import OPTIMIZER_HOOK_TABLES as OPTIMIZER_HOOK_TABLES
from torchspmd._torch.autograd import OPTIMIZER_TABLES as OPTIMIZER_TABLES
from torchspmd._torch.autograd import LaysOutGradient as LaysOutGradient
from torchspmd._torch.autograd import add_gradient_hook as add_gradient_hook
from torchspmd._torch.autograd import after_backward as after_backward
from torchspmd._torch.autograd import after_each_backward as after_each_backward
from torchspmd._torch.autograd import backward_under as backward_under
from torchspmd._torch.autograd import current_node as current_node
from torchspmd._torch.autograd import global_hooks as global_hooks
from torchspmd._torch.autograd import gradient_hook_keys as gradient_hook_keys
from torchspmd._torch.autograd import graph_task as graph_task
from torchspmd._torch.autograd import has_forward_hooks as has_forward_hooks
from torchspmd._torch.autograd import hooks_of as hooks_of
from torchspmd._torch.autograd import node_sequence as node_sequence
from torchspmd._torch.autograd import sequence_number as sequence_number
from torchspmd._torch.autograd import waits_for_nodes as waits_for_nodes
from torchspmd._torch.bindings import Binding as Binding
from torchspmd._torch.bindings import binding_of as binding_of
from torchspmd._torch.call_facts import attention_kernels as attention_kernels
from torchspmd._torch.call_facts import autocast_state as autocast_state
from torchspmd._torch.call_facts import form_check as form_check
from torchspmd._torch.call_facts import function_modes as function_modes
from torchspmd._torch.call_facts import layout_of as layout_of
from torchspmd._torch.call_facts import plain_tensor as plain_tensor
from torchspmd._torch.call_facts import saved_tensor_hooks as saved_tensor_hooks
from torchspmd._torch.call_facts import without_autocast as without_autocast
from torchspmd._torch.capture import FakeWorld as FakeWorld
from torchspmd._torch.capture import copy_all as copy_all
from torchspmd._torch.capture import current_graph as current_graph
from torchspmd._torch.capture import data_dependence_errors as data_dependence_errors
from torchspmd._torch.capture import decomposition as decomposition
from torchspmd._torch.capture import functional as functional
from torchspmd._torch.capture import has_symbols as has_symbols
from torchspmd._torch.capture import holds as holds
from torchspmd._torch.capture import is_symbol as is_symbol
from torchspmd._torch.capture import lazy_module as lazy_module
from torchspmd._torch.capture import (
    operator_of_unknown_size as operator_of_unknown_size,
)
from torchspmd._torch.capture import propagate_shapes as propagate_shapes
from torchspmd._torch.capture import shape_mode as shape_mode
from torchspmd._torch.capture import shapes_of as shapes_of
from torchspmd._torch.capture import sizes_from_inputs as sizes_from_inputs
from torchspmd._torch.capture import sum_over as sum_over
from torchspmd._torch.capture import symbol_of as symbol_of
from torchspmd._torch.capture import trace as trace
from torchspmd._torch.compilation import call_step_hooks as call_step_hooks
from torchspmd._torch.compilation import cuda_graphs_as as cuda_graphs_as
from torchspmd._torch.compilation import is_compiled_module as is_compiled_module
from torchspmd._torch.compilation import (
    is_tracing_for_compile as is_tracing_for_compile,
)
from torchspmd._torch.compilation import keep_from_compiler as keep_from_compiler
from torchspmd._torch.compilation import load_compiler as load_compiler
from torchspmd._torch.compilation import number_hint as number_hint
from torchspmd._torch.compilation import on_graph_replay as on_graph_replay
from torchspmd._torch.compilation import size_hint as size_hint
from torchspmd._torch.compilation import splits_products as splits_products
from torchspmd._torch.compilation import (
    start_kernel_compilers as start_kernel_compilers,
)
from torchspmd._torch.compilation import tell_graph_replay as tell_graph_replay
from torchspmd._torch.dtensor import LOSES_WRITES_OF_LISTS as LOSES_WRITES_OF_LISTS
from torchspmd._torch.dtensor import apply_torch_style as apply_torch_style
from torchspmd._torch.dtensor import build_spec as build_spec
from torchspmd._torch.dtensor import current_mesh as current_mesh
from torchspmd._torch.dtensor import flatten_mesh as flatten_mesh
from torchspmd._torch.dtensor import foreach_norm as foreach_norm
from torchspmd._torch.dtensor import free_shard as free_shard
from torchspmd._torch.dtensor import gather_now as gather_now
from torchspmd._torch.dtensor import is_autocast_enabled as is_autocast_enabled
from torchspmd._torch.dtensor import is_view as is_view
from torchspmd._torch.dtensor import join_axes as join_axes
from torchspmd._torch.dtensor import layouts_by_value as layouts_by_value
from torchspmd._torch.dtensor import local_tensor as local_tensor
from torchspmd._torch.dtensor import (
    register_attention_on_cpu as register_attention_on_cpu,
)
from torchspmd._torch.dtensor import share_memory_of_shards as share_memory_of_shards
from torchspmd._torch.dtensor import sister_axis as sister_axis
from torchspmd._torch.dtensor import spec as spec
from torchspmd._torch.dtensor import start_all_reduce as start_all_reduce
from torchspmd._torch.dtensor import start_all_to_all as start_all_to_all
from torchspmd._torch.dtensor import start_reduce_scatter as start_reduce_scatter
from torchspmd._torch.dtensor import strided_shard as strided_shard
from torchspmd._torch.dtensor import version_of as version_of
from torchspmd._torch.dtensor import wait as wait
from torchspmd._torch.dtensor import wrap_local as wrap_local
from torchspmd._torch.fake_device import FakeDeviceMode as FakeDeviceMode
from torchspmd._torch.fake_device import ShownAsCuda as ShownAsCuda
from torchspmd._torch.fake_device import fake_device as fake_device
from torchspmd._torch.fake_device import in_another_thread as in_another_thread
from torchspmd._torch.fake_device import is_device_tensor as is_device_tensor
from torchspmd._torch.fake_device import is_fake_tensor as is_fake_tensor
from torchspmd._torch.fake_device import is_rehearsed as is_rehearsed
from torchspmd._torch.fake_device import plain_tensors as plain_tensors
from torchspmd._torch.fake_results import fake_result as fake_result
from torchspmd._torch.fake_results import (
    fused_updates_without_values as fused_updates_without_values,
)
from torchspmd._torch.groups import Store as Store
from torchspmd._torch.groups import ddp_on_fake_groups as ddp_on_fake_groups
from torchspmd._torch.groups import ddp_without_values as ddp_without_values
from torchspmd._torch.groups import default_store as default_store
from torchspmd._torch.groups import described_axis as described_axis
from torchspmd._torch.groups import fake_store as fake_store
from torchspmd._torch.groups import file_store as file_store
from torchspmd._torch.groups import find_group as find_group
from torchspmd._torch.groups import gathers_of_any_shape as gathers_of_any_shape
from torchspmd._torch.groups import has_first_buckets as has_first_buckets
from torchspmd._torch.groups import is_first_ddp_step as is_first_ddp_step
from torchspmd._torch.groups import live_meshes as live_meshes
from torchspmd._torch.groups import num_unwaited as num_unwaited
from torchspmd._torch.groups import owned_axis as owned_axis
from torchspmd._torch.groups import private_mesh as private_mesh
from torchspmd._torch.groups import resolve_group as resolve_group
from torchspmd._torch.groups import root_ranks as root_ranks
from torchspmd._torch.groups import uses_gloo as uses_gloo
from torchspmd._torch.groups import work_types as work_types
from torchspmd._torch.inductor import compile_with_inductor as compile_with_inductor
from torchspmd._torch.known_values import Known as Known
from torchspmd._torch.known_values import compute_known as compute_known
from torchspmd._torch.known_values import follow_operator as follow_operator
from torchspmd._torch.known_values import followed as followed
from torchspmd._torch.known_values import forget_known as forget_known
from torchspmd._torch.known_values import hand_on_known as hand_on_known
from torchspmd._torch.known_values import is_worth_following as is_worth_following
from torchspmd._torch.known_values import known_tensor as known_tensor
from torchspmd._torch.known_values import may_follow as may_follow
from torchspmd._torch.known_values import set_known as set_known
from torchspmd._torch.known_values import write_known as write_known
from torchspmd._torch.landmarks import GENERATED_FILE as GENERATED_FILE
from torchspmd._torch.landmarks import GENERATED_NODES as GENERATED_NODES
from torchspmd._torch.landmarks import LANDMARKS as LANDMARKS
from torchspmd._torch.landmarks import Landmark as Landmark
from torchspmd._torch.landmarks import fsdp_module as fsdp_module
from torchspmd._torch.landmarks import hooked_module as hooked_module
from torchspmd._torch.landmarks import (
    implicit_redistribution as implicit_redistribution,
)
from torchspmd._torch.landmarks import is_torch_code as is_torch_code
from torchspmd._torch.landmarks import landmark as landmark
from torchspmd._torch.landmarks import redistribution as redistribution
from torchspmd._torch.landmarks import running_node as running_node
from torchspmd._torch.loading import files_loaded as files_loaded
from torchspmd._torch.operators import ALL_GATHER as ALL_GATHER
from torchspmd._torch.operators import ALL_GATHER_OUT as ALL_GATHER_OUT
from torchspmd._torch.operators import ALL_REDUCE as ALL_REDUCE
from torchspmd._torch.operators import ALL_TO_ALL as ALL_TO_ALL
from torchspmd._torch.operators import REDUCE_SCATTER as REDUCE_SCATTER
from torchspmd._torch.operators import WAIT as WAIT
from torchspmd._torch.operators import Kernel as Kernel
from torchspmd._torch.operators import Signature as Signature
from torchspmd._torch.operators import allows_tf32 as allows_tf32
from torchspmd._torch.operators import argument_names as argument_names
from torchspmd._torch.operators import asked_device as asked_device
from torchspmd._torch.operators import autocast_names as autocast_names
from torchspmd._torch.operators import below_autograd as below_autograd
from torchspmd._torch.operators import call_below as call_below
from torchspmd._torch.operators import draws_random_numbers as draws_random_numbers
from torchspmd._torch.operators import find_overload as find_overload
from torchspmd._torch.operators import flex_attention_by as flex_attention_by
from torchspmd._torch.operators import functional_form as functional_form
from torchspmd._torch.operators import gives_one_tensor as gives_one_tensor
from torchspmd._torch.operators import in_place_form as in_place_form
from torchspmd._torch.operators import is_elementwise as is_elementwise
from torchspmd._torch.operators import is_fused_optimizer as is_fused_optimizer
from torchspmd._torch.operators import is_pointwise as is_pointwise
from torchspmd._torch.operators import keeping_names as keeping_names
from torchspmd._torch.operators import library_name as library_name
from torchspmd._torch.operators import no_autocast as no_autocast
from torchspmd._torch.operators import observe as observe
from torchspmd._torch.operators import on_lists as on_lists
from torchspmd._torch.operators import only_has_effects as only_has_effects
from torchspmd._torch.operators import operator_generation as operator_generation
from torchspmd._torch.operators import packet_name as packet_name
from torchspmd._torch.operators import reduction_in_place as reduction_in_place
from torchspmd._torch.operators import registered_operators as registered_operators
from torchspmd._torch.operators import remove_library as remove_library
from torchspmd._torch.operators import set_arguments as set_arguments
from torchspmd._torch.operators import shared_arguments as shared_arguments
from torchspmd._torch.operators import signature_of as signature_of
from torchspmd._torch.operators import storage_bytes as storage_bytes
from torchspmd._torch.operators import storage_key as storage_key
from torchspmd._torch.operators import tensor_methods as tensor_methods
from torchspmd._torch.operators import written_arguments as written_arguments
from torchspmd._torch.operators import written_values as written_values
from torchspmd._torch.optimizers import choosing_steps as choosing_steps
from torchspmd._torch.optimizers import initial_state as initial_state
from torchspmd._torch.optimizers import scaler_facts as scaler_facts
from torchspmd._torch.optimizers import scaler_tensors as scaler_tensors
from torchspmd._torch.profiling import profiled as profiled
from torchspmd._torch.recurrent import keep_flat_weights as keep_flat_weights
from torchspmd._torch.recurrent import renew_flat_weights as renew_flat_weights
from torchspmd._torch.recurrent import rnn_layer as rnn_layer
from torchspmd._torch.recurrent import without_rnn_kernels as without_rnn_kernels
from torchspmd._torch.regions import LOCAL_NODE_TYPES as LOCAL_NODE_TYPES
from torchspmd._torch.regions import NodeKind as NodeKind
from torchspmd._torch.regions import Record as Record
from torchspmd._torch.regions import dtensor_slots as dtensor_slots
from torchspmd._torch.regions import finished as finished
from torchspmd._torch.regions import flatten_tree as flatten_tree
from torchspmd._torch.regions import has_backward as has_backward
from torchspmd._torch.regions import is_fake as is_fake
from torchspmd._torch.regions import is_in_custom_function as is_in_custom_function
from torchspmd._torch.regions import leaf_paths as leaf_paths
from torchspmd._torch.regions import leaves_of as leaves_of
from torchspmd._torch.regions import map_tensors as map_tensors
from torchspmd._torch.regions import map_tree as map_tree
from torchspmd._torch.regions import node_group as node_group
from torchspmd._torch.regions import node_kind as node_kind
from torchspmd._torch.regions import node_name as node_name
from torchspmd._torch.regions import observe_calls as observe_calls
from torchspmd._torch.regions import record_fields as record_fields
from torchspmd._torch.regions import strided_spec as strided_spec
from torchspmd._torch.regions import unflatten_tree as unflatten_tree
from torchspmd._torch.without_values import dynamic_sizes as dynamic_sizes
from torchspmd._torch.without_values import (
    optimizer_states_on_all_ranks as optimizer_states_on_all_ranks,
)
from torchspmd._torch.without_values import own_chunks_only as own_chunks_only
from torchspmd._torch.without_values import shapes_apart as shapes_apart
from torchspmd._torch.without_values import stages_like_this_one as stages_like_this_one
