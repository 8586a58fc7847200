"""Record the calls in Inductor's code of a function: kernels with tensors, and PyTorch's matmuls.

Its code is a Python function that calls kernels one after the other, and with fixed shapes it calls
the same ones in every run. Checked on PyTorch 2.13.0.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_dynamo.ops import onednn
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.runtime.engines.kernel_source import ENTRY
from ipu_dynamo.runtime.engines.private.promised_kernels import Promise, origin_of
from ipu_dynamo.runtime.engines.replay.recorded import (
    KernelCall,
    MatmulCall,
    NotRecordedError,
    Recorded,
)
from ipu_dynamo.runtime.engines.stage import Stage

_ALLOCATES = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


def record_run(stage: Stage, arguments: Sequence[Tensor]) -> Recorded:
    """Run Inductor's code, and note its calls.

    Raises:
        NotRecordedError: it is something else, or calls something else.
    """
    code = getattr(stage, "__func__", None)
    if not isinstance(code, FunctionType):
        raise NotRecordedError("results are rearranged behind the compiled code")
    scope = code.__globals__
    calls: list[KernelCall | MatmulCall] = []
    kernels = {name: _function(value) for name, value in scope.items()}
    proxies = {
        name: _noting(function, calls) for name, function in kernels.items() if function is not None
    }
    constants = {
        value.untyped_storage().data_ptr(): value
        for value in scope.values()
        if isinstance(value, Tensor)
    }
    # A separate copy: other threads may run the code meanwhile, and their calls are not recorded.
    noting = FunctionType(
        code.__code__, scope | proxies, code.__name__, code.__defaults__, code.__closure__
    )
    try:
        with torch.no_grad(), _Watching(calls):
            results = MethodType(noting, stage.__self__)(list(arguments))  # type: ignore[attr-defined]
    except NotRecordedError:
        raise
    except Exception as error:
        raise NotRecordedError(f"a trial raised {type(error).__name__}: {error}") from error
    return Recorded(tuple(calls), tuple(results), constants)


def _function(value: Any) -> Callable[..., None] | None:
    """Return the compiled kernel in a global variable of generated code, if it is one.

    Raises:
        NotRecordedError: it is one that takes more than tensors.
    """
    if isinstance(value, Promise):
        value = value.function or value
    is_function = isinstance(value, BuiltinFunctionType)
    if is_function and value.__name__.startswith("k_"):
        kernel: Callable[..., None] = value
        return kernel
    if isinstance(value, Promise) or (is_function and value.__name__ == ENTRY):
        raise NotRecordedError("a kernel is compiled by itself")
    return None


def _noting(
    kernel: Callable[..., None], calls: list[KernelCall | MatmulCall]
) -> Callable[..., None]:
    library, symbol = origin_of(kernel)
    try:
        function = getattr(ctypes.CDLL(str(library)), symbol)
    except (OSError, AttributeError) as error:
        raise NotRecordedError(f"a kernel's library does not load: {error}") from error
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None

    def call(*tensors: Any) -> None:
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise NotRecordedError("a kernel takes something that is no tensor")
        calls.append(KernelCall(address, tensors))
        kernel(*tensors)

    return call


class _Watching(TorchDispatchMode):
    """Notes matmuls, and refuses every other operator that computes something."""

    def __init__(self, calls: list[KernelCall | MatmulCall]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(keywords or {})
        if operator is onednn.matmul and arguments[3] == "none":
            a, b, bias, _ = arguments
            made: Tensor = operator(*arguments)
            self._note(a, b, made, bias)
            return made
        if operator is aten.mm.out:
            a, b = arguments
            self._note(a, b, keywords["out"], None)
        elif operator is aten.addmm.out:
            bias, a, b, *factors = arguments
            scales = [*factors, *(keywords.get(name, 1) for name in ("beta", "alpha"))]
            if any(scale != 1 for scale in scales):
                raise NotRecordedError("a matmul is scaled")
            self._note(a, b, keywords["out"], bias)
        elif not (operator.is_view or operator in _ALLOCATES):
            raise NotRecordedError(f"{operator} computes something")
        return operator(*arguments, **keywords)

    def _note(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None) -> None:
        bias = None if bias is None else bias.expand(out.shape)
        self._calls.append(MatmulCall(a, b, out, bias))
