"""Reach the private names of torch that the runtime is built on, in one place.

They may change with any release: this file is what to check first when the supported range of
torch (here and in `pyproject.toml`) moves.
"""

import shutil
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch
import torch._inductor
from torch._decomp import decomposition_table
from torch._decomp.decompositions import upsample_compute_output_size

from ipu_dynamo.ops.aten import MissingOperator

if torch.__version__.split(".")[:2] not in (["2", "13"], ["2", "14"]):
    raise ImportError(
        f"ipu_dynamo calls private operators of PyTorch 2.13 and 2.14, and this is "
        f"{torch.__version__}: install torch>=2.13,<2.15"
    )

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # of kernels that call other operators
AUTOGRAD = torch._C.DispatchKey.Autograd  # of kernels that autograd differentiates
NormBase = torch.nn.modules.batchnorm._NormBase  # of all batch and instance norms


def set_kernel(
    operator: torch._ops.OpOverload | MissingOperator,
    key: torch._C.DispatchKey,
    kernel: Callable[..., Any] | None,
) -> None:
    """Replace the kernel that traces run for an operator; None: they record the operator."""
    if isinstance(operator, MissingOperator):
        return
    operator.py_kernels.pop(key, None)
    operator._dispatch_cache.clear()
    if kernel is not None:
        operator.py_impl(key)(kernel)


# sizes of a picture, the sizes to be or None, factors or None -> the sizes to be, or symbols
upsampled_size: Callable[..., list[int]] = upsample_compute_output_size


def decomposition_of(operator: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """The operators in place of which PyTorch has one, as a function; None: it has none."""
    found: Callable[..., Any] | None = decomposition_table.get(operator)
    return found


_aten = torch.library.Library("aten", "IMPL")


def set_decomposition(
    operator: torch._ops.OpOverload | MissingOperator,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replace an operator's decomposition, which also computes its shapes.

    Args:
        make: of the decomposition that there is, the one to be.
    """
    if isinstance(operator, MissingOperator):
        return
    decomposition = make(decomposition_table[operator])
    decomposition_table[operator] = decomposition
    set_kernel(operator, torch._C.DispatchKey.Meta, decomposition)  # for Python's dispatcher
    name = operator.name().removeprefix("aten::")
    _aten.impl(name, decomposition, "Meta", allow_override=True)


fused_sgd_: Callable[..., None] = torch._fused_sgd_
fused_adam_: Callable[..., None] = torch._fused_adam_
fused_adamw_: Callable[..., None] = torch._fused_adamw_

foreach_add_: Callable[..., None] = torch._foreach_add_
foreach_addcdiv_: Callable[..., None] = torch._foreach_addcdiv_
foreach_addcmul_: Callable[..., None] = torch._foreach_addcmul_
foreach_copy_: Callable[..., None] = torch._foreach_copy_
foreach_div_: Callable[..., None] = torch._foreach_div_
foreach_lerp_: Callable[..., None] = torch._foreach_lerp_
foreach_neg_: Callable[..., None] = torch._foreach_neg_
foreach_sqrt_: Callable[..., None] = torch._foreach_sqrt_
foreach_sub_: Callable[..., None] = torch._foreach_sub_
foreach_zero_: Callable[..., None] = torch._foreach_zero_


# x [m, k], weight [n, k] plain or packed, bias [n] or None, activation, [], its algorithm -> [m, n]
onednn_linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default
# weight [n, k], the rows that x will have -> the weight in the library's own order
onednn_pack: Callable[..., torch.Tensor] = torch.ops.mkldnn._reorder_linear_weight.default


def foreach_scale_(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply by a number, rounding the products only.

    `torch._foreach_mul_` of PyTorch 2.13 also rounds the number to float16 on the CPU.
    """
    if tensors[0].is_cpu:
        for tensor in tensors:
            tensor.mul_(factor)
    else:
        torch._foreach_mul_(tensors, factor)


def has_fused_sgd(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `fused_sgd_` updates tensors of `dtype` on `device`.

    On the CPU it does not for float16 and bfloat16: the vectorised loop of PyTorch 2.13.0 updates
    the momentum and never stores the parameter.
    """
    return device.type != "cpu" or dtype in (torch.float32, torch.float64)


def inductor_options() -> list[str]:
    """The names of Inductor's options, as `torch.compile` takes them."""
    names: list[str] = torch._inductor.list_options()
    return names


def compiler_settings() -> str:
    """Inductor's settings in force, as a digest."""
    settings = torch._inductor.config.save_config_portable()
    return sha256(repr(sorted(settings.items())).encode()).hexdigest()


_CUSTOM_PASSES = (  # settings that `save_config_portable` leaves out
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
    "_fuse_ddp_communication_passes",
    "custom_partitioner_fn",
)


def custom_pass_names() -> tuple[object, ...] | None:
    """The identifiers, by `uuid()`, of the passes that a user gave to Inductor.

    None if one of them has no identifier: a plain function, or a pass whose `uuid` is None.
    """
    from torch._inductor.codegen.common import custom_backend_passes  # takes a second to import

    passes = [(name, getattr(torch._inductor.config, name, None)) for name in _CUSTOM_PASSES]
    passes += [(device, chosen) for device, chosen in custom_backend_passes.items()]
    names: list[object] = []
    for place, chosen in passes:
        for custom in chosen if isinstance(chosen, list | tuple) else (chosen,):
            if custom is None or custom is False:
                continue
            name = custom if isinstance(custom, str) else getattr(custom, "uuid", lambda: None)()
            if name is None:
                return None
            names.append((place, name))
    return tuple(names)


def mkldnn_enabled() -> bool:
    return bool(torch._C._get_mkldnn_enabled())


def cpp_compiler_names() -> tuple[str, ...]:
    """The programs that Inductor tries as its C++ compiler, in order."""
    configured = torch._inductor.config.cpp.cxx
    names = configured if isinstance(configured, list | tuple) else (configured,)
    return tuple(name for name in names if name) or ("g++",)


def find_compiler() -> str | None:
    """The file of the C++ compiler that Inductor will call; None: there is none."""
    return next((path for name in cpp_compiler_names() if (path := shutil.which(name))), None)


def in_memory(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """`tensor` with these strides; compiled code has it in memory, and computes it only once."""
    from torch._inductor.inductor_prims import force_stride_order  # takes a second

    laid_out: torch.Tensor = force_stride_order(tensor, strides)
    return laid_out
