"""Run PyTorch programs for IPUs anywhere: one compiler, one runtime, `torch.compile` and PopTorch.

Names are loaded on first use, since every import of a submodule runs this file.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ipu_dynamo.version import __version__

if TYPE_CHECKING:
    from ipu_dynamo.blocks import BeginBlock, Block, BlockFunction
    from ipu_dynamo.capture.control_flow.higher_order import cond, for_loop
    from ipu_dynamo.capture.custom.custom_operators import custom_operator, register_custom_operator
    from ipu_dynamo.capture.custom.host_functions import HostFunction
    from ipu_dynamo.debug.bisect import Difference, bisect
    from ipu_dynamo.errors import CompileError, ExecutionError, InputError, IpuError
    from ipu_dynamo.inspection.inspect_model import inspect
    from ipu_dynamo.inspection.inspection import Inspection
    from ipu_dynamo.machine.single_operator import operator_cost
    from ipu_dynamo.ops.library.keyed_random import (
        keyed_bernoulli,
        keyed_dropout,
        keyed_normal,
        keyed_randint,
        keyed_uniform,
        replica_index,
    )
    from ipu_dynamo.ops.marks.available_memory import set_available_memory
    from ipu_dynamo.ops.marks.convolution_groups import ConvolutionGroup
    from ipu_dynamo.ops.marks.markers import identity_loss, recomputation_checkpoint
    from ipu_dynamo.ops.marks.overlap import set_overlap_for_input, set_overlap_for_output
    from ipu_dynamo.ops.marks.print_tensor import print_tensor
    from ipu_dynamo.ops.marks.serialized import serialized_matmul
    from ipu_dynamo.options import Location, Locations, Options, StageSpec, Strategy
    from ipu_dynamo.options.loss_scaling import AutomaticLossScaling
    from ipu_dynamo.options.replica_groups import ReplicaGroups
    from ipu_dynamo.profiling.profile import profile
    from ipu_dynamo.program import ClipGlobalNorm, ClipGradNorm, ClipGradValue
    from ipu_dynamo.program.program_drawing import draw_program
    from ipu_dynamo.program.schedule.several_schedules import draw_schedules
    from ipu_dynamo.program_history import programs
    from ipu_dynamo.report.html_page import write_report
    from ipu_dynamo.report.memory_picture import draw_memory
    from ipu_dynamo.report.trace import write_trace
    from ipu_dynamo.saved.refusal import Reason, SavedProgramError
    from ipu_dynamo.saved.values import register_named_tuple
    from ipu_dynamo.torch_compile.backend_options import BackendOptions
    from ipu_dynamo.torch_compile.explanation import explain
    from ipu_dynamo.whole_step.api import compile_inference, compile_training
    from ipu_dynamo.whole_step.checkpoints.checkpoint_files import latest_checkpoint
    from ipu_dynamo.whole_step.checkpoints.load_checkpoint import load_checkpoint
    from ipu_dynamo.whole_step.checkpoints.save_checkpoint import save_checkpoint
    from ipu_dynamo.whole_step.compiled_model import CompiledModel
    from ipu_dynamo.whole_step.free_rows import FreeRows, free_rows
    from ipu_dynamo.whole_step.optimizer.function_update import TracedUpdate
    from ipu_dynamo.whole_step.predict_model import predict
    from ipu_dynamo.whole_step.ranks import rows_of_rank
    from ipu_dynamo.whole_step.saving.load import load, load_entries
    from ipu_dynamo.whole_step.saving.loaded_model import LoadedModel
    from ipu_dynamo.whole_step.saving.save import save

__all__ = [
    "AutomaticLossScaling",
    "BackendOptions",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "ClipGlobalNorm",
    "ClipGradNorm",
    "ClipGradValue",
    "CompileError",
    "CompiledModel",
    "ConvolutionGroup",
    "Difference",
    "ExecutionError",
    "FreeRows",
    "HostFunction",
    "InputError",
    "Inspection",
    "IpuError",
    "LoadedModel",
    "Location",
    "Locations",
    "Options",
    "Reason",
    "ReplicaGroups",
    "SavedProgramError",
    "StageSpec",
    "Strategy",
    "TracedUpdate",
    "__version__",
    "bisect",
    "compile_inference",
    "compile_training",
    "cond",
    "custom_operator",
    "draw_memory",
    "draw_program",
    "draw_schedules",
    "explain",
    "for_loop",
    "free_rows",
    "identity_loss",
    "inspect",
    "keyed_bernoulli",
    "keyed_dropout",
    "keyed_normal",
    "keyed_randint",
    "keyed_uniform",
    "latest_checkpoint",
    "load",
    "load_checkpoint",
    "load_entries",
    "operator_cost",
    "predict",
    "print_tensor",
    "profile",
    "programs",
    "recomputation_checkpoint",
    "register_custom_operator",
    "register_named_tuple",
    "replica_index",
    "rows_of_rank",
    "save",
    "save_checkpoint",
    "serialized_matmul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "write_report",
    "write_trace",
]

_NAMES_IN = {
    "ipu_dynamo.torch_compile.backend_options": ("BackendOptions",),
    "ipu_dynamo.capture.control_flow.higher_order": ("cond", "for_loop"),
    "ipu_dynamo.blocks": ("BeginBlock", "Block", "BlockFunction"),
    "ipu_dynamo.capture.custom.custom_operators": ("custom_operator", "register_custom_operator"),
    "ipu_dynamo.capture.custom.host_functions": ("HostFunction",),
    "ipu_dynamo.machine.single_operator": ("operator_cost",),
    "ipu_dynamo.ops.library.keyed_random": (
        "keyed_bernoulli",
        "keyed_dropout",
        "keyed_normal",
        "keyed_randint",
        "keyed_uniform",
        "replica_index",
    ),
    "ipu_dynamo.ops.marks.available_memory": ("set_available_memory",),
    "ipu_dynamo.ops.marks.convolution_groups": ("ConvolutionGroup",),
    "ipu_dynamo.ops.marks.markers": ("identity_loss", "recomputation_checkpoint"),
    "ipu_dynamo.ops.marks.overlap": ("set_overlap_for_input", "set_overlap_for_output"),
    "ipu_dynamo.ops.marks.print_tensor": ("print_tensor",),
    "ipu_dynamo.ops.marks.serialized": ("serialized_matmul",),
    "ipu_dynamo.whole_step.compiled_model": ("CompiledModel",),
    "ipu_dynamo.whole_step.api": ("compile_inference", "compile_training"),
    "ipu_dynamo.debug.bisect": ("Difference", "bisect"),
    "ipu_dynamo.errors": ("CompileError", "ExecutionError", "InputError", "IpuError"),
    "ipu_dynamo.torch_compile.explanation": ("explain",),
    "ipu_dynamo.options.loss_scaling": ("AutomaticLossScaling",),
    "ipu_dynamo.options": ("Location", "Locations", "Options", "StageSpec", "Strategy"),
    "ipu_dynamo.options.replica_groups": ("ReplicaGroups",),
    "ipu_dynamo.program.ir.clipping": ("ClipGlobalNorm", "ClipGradNorm", "ClipGradValue"),
    "ipu_dynamo.inspection.inspect_model": ("inspect",),
    "ipu_dynamo.inspection.inspection": ("Inspection",),
    "ipu_dynamo.program.program_drawing": ("draw_program",),
    "ipu_dynamo.program.schedule.several_schedules": ("draw_schedules",),
    "ipu_dynamo.profiling.profile": ("profile",),
    "ipu_dynamo.program_history": ("programs",),
    "ipu_dynamo.report.html_page": ("write_report",),
    "ipu_dynamo.report.memory_picture": ("draw_memory",),
    "ipu_dynamo.report.trace": ("write_trace",),
    "ipu_dynamo.saved.refusal": ("Reason", "SavedProgramError"),
    "ipu_dynamo.saved.values": ("register_named_tuple",),
    "ipu_dynamo.whole_step.checkpoints.checkpoint_files": ("latest_checkpoint",),
    "ipu_dynamo.whole_step.checkpoints.load_checkpoint": ("load_checkpoint",),
    "ipu_dynamo.whole_step.checkpoints.save_checkpoint": ("save_checkpoint",),
    "ipu_dynamo.whole_step.free_rows": ("FreeRows", "free_rows"),
    "ipu_dynamo.whole_step.optimizer.function_update": ("TracedUpdate",),
    "ipu_dynamo.whole_step.predict_model": ("predict",),
    "ipu_dynamo.whole_step.ranks": ("rows_of_rank",),
    "ipu_dynamo.whole_step.saving.load": ("load", "load_entries"),
    "ipu_dynamo.whole_step.saving.loaded_model": ("LoadedModel",),
    "ipu_dynamo.whole_step.saving.save": ("save",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


if os.environ.get("IPU_DYNAMO_TRACE"):
    import_module("ipu_dynamo.profiling.profile")  # records from now on
