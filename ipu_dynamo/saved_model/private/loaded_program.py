"""Build an exported program from parts that the gate has checked."""

import io
import logging
import math
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._export.serde import schema, serialize
from torch.export import ExportedProgram

from ipu_dynamo.saved_model.gate.refusal import Refusal, damaged

_LOGS = ("torch._export.serde.serialize", "torch.fx.experimental", "torch._subclasses")


def tensor_of(meta: schema.TensorMeta, storage: Tensor) -> Tensor:
    """A view of the bytes of a storage.

    Args:
        storage: uint8[nbytes].

    Raises:
        Refusal: the view is not inside of the storage, or of a type that is not known here.
    """
    dtype = serialize._SERIALIZE_TO_TORCH_DTYPE.get(meta.dtype)
    if dtype is None or meta.layout != schema.Layout.Strided:
        raise Refusal(f"a tensor of type {meta.dtype} and layout {meta.layout}")
    sizes, strides = _numbers(meta.sizes), _numbers(meta.strides)
    (offset,) = _numbers([meta.storage_offset])
    if len(sizes) != len(strides) or min([offset, *sizes, *strides]) < 0:
        raise damaged(f"a tensor with sizes {sizes}, strides {strides} and offset {offset}")
    whole = storage.numel() // dtype.itemsize
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if math.prod(sizes) and offset + reach >= whole:
        raise damaged(f"a tensor reaches element {offset + reach} of {whole}")
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=dtype)
    typed = storage[: whole * dtype.itemsize].view(dtype)
    return typed.as_strided(sizes, strides, offset)


def _numbers(values: list[schema.SymInt]) -> list[int]:
    if any(value.type != "as_int" for value in values):
        raise Refusal("a stored tensor whose size is an expression")
    return [value.as_int for value in values]


def sample_inputs(content: memoryview) -> Any:
    """Example arguments as tuples, lists and dicts of tensors and numbers.

    Raises:
        Refusal: there is something else in them.
    """
    try:
        value = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise Refusal(f"more than plain tensors and numbers ({str(error)[:80]!r})") from error
    _check_plain(value, 0)
    return value


def _check_plain(value: Any, depth: int) -> None:
    if depth > 100:
        raise Refusal("values nested more than 100 deep", trusting=False)
    match value:
        case dict():
            parts = list(value.values())
        case tuple() | list():
            parts = list(value)
        case None | bool() | int() | float() | Tensor():
            return
        case _:
            raise Refusal(f"a value of type {type(value).__name__}")
    for part in parts:
        _check_plain(part, depth + 1)


def build_program(
    program: schema.ExportedProgram,
    state: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
    examples: Any,
) -> ExportedProgram:
    """The program whose parts were checked.

    Raises:
        Refusal: the parts do not fit together.
    """
    _check_described(program.graph_module, {**state, **constants})
    with _quiet():
        try:
            return serialize.ExportedProgramDeserializer().deserialize(
                program, dict(state), dict(constants), examples
            )
        except Refusal:
            raise
        except RecursionError:
            raise Refusal("the program is nested too deep", trusting=False) from None
        except Exception as error:  # PyTorch raises various errors for parts that do not fit
            *_, last = str(error).strip().splitlines() or [""]
            raise damaged(f"its parts do not fit ({type(error).__name__}: {last[:120]})") from error


def _check_described(module: schema.GraphModule, tensors: Mapping[str, Tensor]) -> None:
    """Check the types and shapes of parameters in the graph, as compilers rely on them."""
    for spec in module.signature.input_specs:
        value = spec.value
        match spec.type:
            case "parameter":
                name = value.parameter_name
            case "buffer":
                name = value.buffer_name
            case "tensor_constant":
                name = value.tensor_constant_name
            case _:
                continue
        meta = module.graph.tensor_values.get(value.arg.name)
        if name not in tensors or meta is None:
            raise damaged(f"parameter or buffer {name!r} is not there")
        tensor = tensors[name]
        dtype = serialize._SERIALIZE_TO_TORCH_DTYPE.get(meta.dtype)
        if tensor.dtype != dtype or list(tensor.shape) != _numbers(meta.sizes):
            raise damaged(f"{name!r} has another type or shape than the graph says")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch's notices, as a refusal has the same facts."""
    logs = [logging.getLogger(name) for name in _LOGS]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
