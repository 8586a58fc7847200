"""Note which tensors of the user's a trace takes by their value, and whether they still have it.

A tensor that is no input, parameter or buffer, but an attribute, a global or a variable around the
model, is a constant of the program. So is a number, an index or a NumPy array that Python makes of
it. Each such tensor is kept with its value and the line that read it.
"""

import linecache
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from ipu_dynamo import noted_warnings
from ipu_dynamo.capture.private.kept_tensors import is_left, real_of
from ipu_dynamo.capture.private.tracing import (
    constant_value,
    is_fake,
    is_real,
    is_traced,
    node_of,
    tracer_here,
    unrecorded,
)
from ipu_dynamo.capture.tensor_objects import is_users_class, subclass_error
from ipu_dynamo.errors import NO_LINE, CompileError, called_from, is_library, source_line
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.thread_modes import KeptGradMode

# Methods by which Python reads a tensor's values.
_READS = {
    "__array__", "__bool__", "__complex__", "__deepcopy__", "__dlpack__", "__float__", "__index__",
    "__int__", "item", "numpy", "tolist",
}  # fmt: skip
# Methods that read no value of a tensor.
_LOOKS = {
    "__format__", "__get__", "__hash__", "__len__", "__repr__", "data_ptr", "dim", "element_size",
    "get_device", "is_complex", "is_conj", "is_contiguous", "is_floating_point", "is_inference",
    "is_neg", "is_same_size", "is_signed", "ndimension", "nelement", "numel", "result_type", "size",
    "storage_offset", "stride", "untyped_storage",
}  # fmt: skip
_get_data, _set_data = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class TensorAttribute:
    """A plain tensor that is an attribute of modules; the trace runs on a copy, which it may
    change. `holder` is a module's own dictionary, which has the tensor under `key`."""

    name: str
    tensor: Tensor
    copy: Tensor
    holder: Mapping[str, Any]
    key: str


NONE: Mapping[int, TensorAttribute] = {}


@dataclass(frozen=True, slots=True, eq=False)
class OutsideTensor:
    """A tensor of the user's that a trace took by its value.

    Args:
        name: its name in the user's program; "" for one without a name.
        tensor: the user's own.
        value: its value during the trace.
        where: the line that read it first.
        holder: the namespace that has it under `key`: of a module, or of a file.
        is_news: whether a warning names it.
    """

    name: str
    tensor: Tensor
    value: Tensor
    where: str
    holder: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    is_news: bool = True

    def __str__(self) -> str:
        return f"the tensor {self.name} {tuple(self.value.shape)}".replace("  ", " ")

    @property
    def is_changed(self) -> bool:
        """Whether it has another value by now, or its name belongs to something else."""
        now = self.holder.get(self.key) if self.key else self.tensor
        return not isinstance(now, Tensor) or not _equal(now, self.value)


def changed(outside: Sequence[OutsideTensor]) -> str | None:
    """Name the first tensor whose value has changed since compilation; None: none has."""
    for one in outside:
        if one.is_changed:
            return (
                f"{one} has another value than when the program was compiled, where it became a "
                f"constant\n  from: {one.where}"
            )
    return None


def warn(outside: Sequence[OutsideTensor]) -> None:
    """Tell of each tensor once, with the line that read it first."""
    for one in outside:
        if one.is_news:
            noted_warnings.warn(
                f"{one} is neither an input, a parameter nor a buffer; its present value becomes a "
                f"constant of the program\n  from: {one.where}\n"
                "  try:  register_buffer, and copy_ if it changes; or pass it as an argument",
            )


class OutsideReads(TorchFunctionMode):
    """While entered, tensors that are not traced are noted when a function gets them.

    Args:
        attributes: plain tensors of modules, by identity, with the copies that forward sees.
        stand_ins: the traced tensors that stand for the model's own, by the identity of the latter.
            Python may have kept a model's own tensor in another place than the module.
    """

    def __init__(self, attributes: Mapping[int, TensorAttribute], stand_ins: Mapping[int, Tensor]):
        super().__init__()
        self._copies = {id(attribute.copy): attribute for attribute in attributes.values()}
        self._stand_ins = stand_ins
        self._noted: dict[int, OutsideTensor] = {}
        self._made: list[tuple[weakref.ref[Tensor], CodeType | None, int]] = []
        self._tracer = tracer_here()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__set__" and func == _set_data:
            raise CompileError(
                "forward assigns to .data of a tensor, which a program cannot follow",
                where=called_from(),
                hint="copy_ under torch.no_grad(), or another name for the new tensor",
                id="in-place",
            )
        if name == "__get__" and func == _get_data:
            func = Tensor.detach
        if name in _LOOKS and func is not Tensor.detach:
            return func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        if any(is_left(x) or id(x) in self._stand_ins for x in tensors):
            args, kwargs = self._replaced(args), self._replaced(kwargs)
            tensors = _tensors((args, kwargs))
        real = [x for x in tensors if is_real(x)]
        for tensor in real:
            self._note(tensor, is_news=name != "lift_fresh_copy")  # which says that it is constant
        if name in _READS and real:
            return _read(func, args, kwargs)
        for kind in types:
            if issubclass(kind, Tensor) and is_users_class(kind):
                raise subclass_error(kind)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self.watch(tensor)
        return result

    def watch(self, tensor: Tensor) -> None:
        """Note that Python gets a tensor of the trace on its present line."""
        if is_fake(tensor):
            frame = _users_frame()
            code, line = (frame.f_code, frame.f_lineno) if frame is not None else (None, 0)
            self._made.append((weakref.ref(tensor), code, line))

    def left(self) -> list[tuple[Tensor, fx.Node | None, str]]:
        """Tensors of the trace that Python still has after it: each with its node in the graph, and
        the line that made it."""
        alive: dict[int, tuple[Tensor, fx.Node | None, str]] = {}
        for reference, code, line in self._made:
            if (tensor := reference()) is not None and id(tensor) not in alive:
                where = NO_LINE
                if code is not None:
                    text = linecache.getline(code.co_filename, line).strip()
                    where = f"{Path(code.co_filename).name}:{line} in {code.co_name}: {text}"
                alive[id(tensor)] = tensor, node_of(tensor, self._tracer), where
        return list(alive.values())

    def of(self, module: fx.GraphModule) -> tuple[OutsideTensor, ...]:
        """All tensors that were read, also those that are only found in the traced graph."""
        self._noted |= outside_of_graph(module, self._noted, self._copies)
        return tuple(self._noted.values())

    def _note(self, tensor: Tensor, *, is_news: bool) -> None:
        """Keep the value of `tensor` before forward changes it."""
        if id(tensor) in self._noted or is_traced(tensor):
            return
        where = called_from()
        if copy := self._copies.get(id(tensor)):
            noted = OutsideTensor(
                copy.name, copy.tensor, _kept(copy.tensor), where, copy.holder, copy.key, is_news
            )
        else:
            name, holder = _called(tensor)
            key = name if holder else ""
            noted = OutsideTensor(name, tensor, _kept(tensor), where, holder, key, is_news)
        self._noted[id(tensor)] = noted

    def _replaced(self, value: Any) -> Any:
        """`value` with stand-ins for the model's own tensors."""
        if isinstance(value, Tensor):
            return real_of(value) if is_left(value) else self._stand_ins.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(self._replaced, value))
        if type(value) is dict:
            return {key: self._replaced(each) for key, each in value.items()}
        return value


def outside_of_graph(
    module: fx.GraphModule,
    noted: Collection[int] = (),
    copies: Mapping[int, TensorAttribute] = NONE,
) -> dict[int, OutsideTensor]:
    """Tensors that a traced graph holds, but those that forward made of numbers; by identity.

    Args:
        noted: leave these out.
        copies: plain tensors of modules, by the identity of the copies that forward saw.
    """
    constants: dict[int, list[fx.Node]] = {}
    values = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if isinstance(value, Tensor) and is_real(value) and id(value) not in noted:
            constants.setdefault(id(value), []).extend(node.users)
            values[id(value)] = value
    outside = {}
    for key, users in constants.items():
        value = values[key]
        made = all(user.target is aten.lift_fresh_copy.default for user in users)
        if made and value.untyped_storage().resizable():
            continue  # forward made it of numbers; no other code has it
        where = source_line(users[0]) if users else NO_LINE
        copy = copies.get(key)
        name, tensor = (copy.name, copy.tensor) if copy else ("", value)
        outside[key] = OutsideTensor(name, tensor, _kept(value), where, is_news=not made)
    return outside


def _read(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let Python read a tensor, if its value does not depend on the trace's inputs."""
    tensor = args[0]
    if is_traced(tensor):  # forward has changed it
        known = constant_value(tensor)
        if known is None:
            raise CompileError(
                "Python code depends on the value of a tensor, which is not known when compiling",
                where=called_from(),
                hint="compute with tensors (torch.where), or move the decision out of the model",
                id="value",
            )
        args = (known, *args[1:])
    with unrecorded():
        return func(*args, **kwargs)


def _kept(tensor: Tensor) -> Tensor:
    with unrecorded():
        return tensor.detach().clone()


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    with KeptGradMode(), unrecorded():  # a call compares, too
        other = other.to(one.device)
        return torch.equal(one, other) or bool(
            one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        )


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among arguments of a function, and in lists and indices among them."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [x for value in values for x in _tensors(value)]
    if isinstance(values, dict):
        return [x for value in values.values() for x in _tensors(value)]
    if isinstance(values, slice):
        return _tensors((values.start, values.stop, values.step))
    return []


def _called(tensor: Tensor) -> tuple[str, Mapping[str, Any]]:
    """A tensor's name in the user's innermost frame; with the file's names, if it is a global."""
    frame = _users_frame()
    if frame is None:
        return "", {}
    for names, holder in ((frame.f_locals, {}), (frame.f_globals, frame.f_globals)):
        for name, value in names.items():
            if value is tensor:
                return name, holder
    return "", {}


def _users_frame() -> FrameType | None:
    """The user's innermost frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        (file := frame.f_code.co_filename) == "<string>" or is_library(file)
    ):
        frame = frame.f_back
    return frame


def holds_tensors(value: Any, depth: int = 3) -> bool:
    """Whether an object, which is no module, has tensors in attributes or elements."""
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, nn.Module | type | ModuleType | str | bytes):
        return False
    inner: list[Any] = list(getattr(value, "__dict__", {}).values())
    inner += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    if isinstance(value, dict):
        inner += value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inner += value
    return any(holds_tensors(each, depth - 1) for each in inner)
