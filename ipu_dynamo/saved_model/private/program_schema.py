"""Make the objects from which PyTorch reads an exported program, and check each part.

They come from JSON, which PyTorch's own reader does not check. Here every value has the type in the
schema. Texts that would be evaluated, looked up, imported or written into code are checked by the
lists of the gate.
"""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Annotated, Any

from torch._export.serde import schema
from torch._export.serde.union import _Union

from ipu_dynamo.saved_model.files.json_values import parse_json
from ipu_dynamo.saved_model.gate.names import check_identifier, check_qualified_name
from ipu_dynamo.saved_model.gate.operators import WITH_GRAPHS, check_operator
from ipu_dynamo.saved_model.gate.refusal import Refusal, damaged
from ipu_dynamo.saved_model.gate.size_expressions import checked
from ipu_dynamo.saved_model.gate.tree_specs import checked_spec

SCHEMA_MAJOR = schema.SCHEMA_VERSION[0]
_KEPT = ("stack_trace", "nn_module_stack", "torch_fn")  # of a node's metadata, and `custom`
_UNNAMED = {"as_operator", "as_custom_obj"}
_RANGE_MARKS = frozenset(" +-*()")
_DEEPEST = 100


def read_schema(value: Any) -> schema.ExportedProgram:
    """The exported program that a JSON value describes.

    Raises:
        Refusal: a part is of another type than the schema says, or is not on the lists.
    """
    return _build(schema.ExportedProgram, value, "the program", 0)  # type: ignore[no-any-return]


def read_payload(value: Any) -> schema.PayloadConfig:
    """The list of weights or constants that a JSON value describes."""
    return _build(schema.PayloadConfig, value, "the list", 0)  # type: ignore[no-any-return]


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, globalns=vars(schema), include_extras=False)


def _build(cls: Any, value: Any, where: str, depth: int) -> Any:
    """`value` as `cls` says."""
    if depth > _DEEPEST:
        raise Refusal(f"the program is nested more than {_DEEPEST} deep", trusting=False)
    origin = typing.get_origin(cls)
    if origin is Annotated:
        return _build(typing.get_args(cls)[0], value, where, depth)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [kind for kind in typing.get_args(cls) if kind is not type(None)]
        return None if value is None else _build(inner, value, where, depth)
    if origin is list:
        _expect(value, list, where)
        (kind,) = typing.get_args(cls)
        return [_build(kind, item, where, depth + 1) for item in value]
    if origin is dict:
        _expect(value, dict, where)
        kind = typing.get_args(cls)[1]
        return {key: _build(kind, item, where, depth + 1) for key, item in value.items()}
    if dataclasses.is_dataclass(cls):
        return _object(cls, value, depth)
    return _leaf(cls, value, where)


def _object(cls: Any, value: Any, depth: int) -> Any:
    _expect(value, dict, cls.__name__)
    hints = _hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    if unknown := sorted(value.keys() - set(names)):
        raise Refusal(f"{cls.__name__} has a field {unknown[0][:80]!r} that is not known here")
    union = issubclass(cls, _Union)
    if union and len(value) != 1:
        raise damaged(f"{cls.__name__} with {len(value)} values")
    fields = {
        name: _build(hints[name], item, f"{cls.__name__}.{name}", depth + 1)
        for name, item in value.items()
    }
    if union and (refused := _UNNAMED & fields.keys()):
        raise Refusal(f"an argument of the kind {refused.pop()!r}")
    try:
        result = cls.create(**fields) if union else cls(**fields)
    except TypeError as error:
        raise damaged(f"{cls.__name__} lacks a field: {error}") from error
    if check := _CHECKS.get(cls):
        check(result)
    return result


def _leaf(cls: Any, value: Any, where: str) -> Any:
    if isinstance(cls, type) and issubclass(cls, IntEnum):
        _expect(value, int, where)
        try:
            return cls(value)
        except ValueError as error:
            raise damaged(f"{where} is {value}, which the schema has not") from error
    if cls is float:
        if value in ("Infinity", "-Infinity", "NaN") or type(value) in (int, float):
            return float(value)
        raise damaged(f"{where} is no number")
    _expect(value, cls, where)
    if cls is int and not -(2**63) <= value < 2**64:
        raise Refusal(f"{where} is {str(value)[:40]}, more than 64 bits", trusting=False)
    return value


def _expect(value: Any, kind: type, where: str) -> None:
    if type(value) is not kind:
        raise damaged(f"{where} is a JSON {type(value).__name__}, not {kind.__name__}")


def _named(value: Any) -> None:
    if value.name:
        check_identifier(value.name)


def _keyword(value: schema.NamedArgument) -> None:
    if value.name:
        check_identifier(value.name, hides=True)


def _sym_argument(value: Any) -> None:
    if value.type == "as_name":
        check_identifier(value.as_name)


def _sym_expr(value: schema.SymExpr) -> None:
    value.expr_str = checked(value.expr_str)


def _device(value: schema.Device) -> None:
    if value.type != "cpu":
        raise Refusal(f"device {value.type[:40]!r}: save the program from the cpu", trusting=False)


def _node(value: schema.Node) -> None:
    check_operator(value.target)
    if value.name is not None:
        check_identifier(value.name)
    graphs = any(argument.arg.type == "as_graph" for argument in value.inputs)
    if graphs and value.target not in WITH_GRAPHS:
        raise Refusal(f"operator {value.target!r} with a graph as an argument")
    metadata = {key: value.metadata[key] for key in _KEPT if key in value.metadata}
    if custom := value.metadata.get("custom"):
        metadata["custom"] = _custom(custom)
    value.metadata = metadata


def _custom(text: str) -> str:
    """Check the notes of a node, and write them anew."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise damaged(f"the notes of a node are no JSON: {error}") from error
    if not isinstance(value, dict):
        raise damaged("the notes of a node are no object")
    return json.dumps(value)


def _graph(value: schema.Graph) -> None:
    for values in (
        *(value.tensor_values, value.sym_int_values),
        *(value.sym_bool_values, value.sym_float_values),
    ):
        for name in values:
            check_identifier(name)
    if value.custom_obj_values:
        raise Refusal("the program holds custom objects")


def _parameter(name: str) -> Callable[[Any], None]:
    return lambda value: check_qualified_name(getattr(value, name))


def _call(value: schema.ModuleCallSignature) -> None:
    value.in_spec = checked_spec(value.in_spec, arguments=True)
    value.out_spec = checked_spec(value.out_spec, arguments=False)
    for name in value.forward_arg_names or ():
        check_identifier(name)


def _graph_module(value: schema.GraphModule) -> None:
    value.metadata = {}
    value.treespec_namedtuple_fields = {}
    for entry in value.module_call_graph:
        if entry.fqn:
            check_qualified_name(entry.fqn.partition("@")[0])


def _program(value: schema.ExportedProgram) -> None:
    if value.schema_version.major != SCHEMA_MAJOR:
        raise Refusal(
            f"version {value.schema_version.major} of exported programs, and this PyTorch reads "
            f"{SCHEMA_MAJOR}: save it again",
            trusting=False,
        )
    if odd := [name for name in value.verifiers if name not in ("TRAINING", "ATEN")]:
        raise Refusal(f"a program for the verifier {odd[0][:40]!r}")
    value.guards_code = []
    for key in value.range_constraints:
        rest = {letter for letter in key if not letter.isalnum()} - _RANGE_MARKS
        if len(key) > 1000 or rest or not key.isascii() or not key.strip():
            raise Refusal(f"a range of {key[:80]!r}, which is no size")
        # PyTorch counts up to the number of such a size, and reads it with int()
        if key.startswith(("u", "zuf")) and not re.fullmatch(r"(?:u|zuf)[0-9]{1,5}", key):
            raise Refusal(f"a range of {key[:80]!r}, a size whose number is not below 100000")


def _custom_object(value: Any) -> None:
    raise Refusal(f"a custom object ({type(value).__name__})")


_CHECKS: dict[type, Callable[[Any], None]] = {
    schema.TensorArgument: _named,
    schema.TokenArgument: _custom_object,
    schema.CustomObjArgument: _custom_object,
    schema.GraphArgument: _named,
    schema.NamedArgument: _keyword,
    schema.InputToConstantInputSpec: _named,
    schema.SymIntArgument: _sym_argument,
    schema.SymFloatArgument: _sym_argument,
    schema.SymBoolArgument: _sym_argument,
    schema.SymExpr: _sym_expr,
    schema.Device: _device,
    schema.Node: _node,
    schema.Graph: _graph,
    schema.GraphModule: _graph_module,
    schema.InputToParameterSpec: _parameter("parameter_name"),
    schema.InputToBufferSpec: _parameter("buffer_name"),
    schema.InputToTensorConstantSpec: _parameter("tensor_constant_name"),
    schema.BufferMutationSpec: _parameter("buffer_name"),
    schema.ParameterMutationSpec: _parameter("parameter_name"),
    schema.ModuleCallSignature: _call,
    schema.ExportedProgram: _program,
}
