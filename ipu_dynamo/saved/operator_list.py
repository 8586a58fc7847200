"""Hold the operators of a saved program to those that this process has, in the same form."""

from collections.abc import Iterable
from typing import Any

from torch import fx

from ipu_dynamo.errors import source_line
from ipu_dynamo.ops.library.host_call import calls_host, host_call
from ipu_dynamo.ops.operators import operator_name, operator_named
from ipu_dynamo.ops.private.graphs import schema_of
from ipu_dynamo.ops.unchecked_operators import unchecked
from ipu_dynamo.program import Program
from ipu_dynamo.saved.json_text import expect
from ipu_dynamo.saved.refusal import Reason, SavedProgramError

# Their versions are known, and no Python of a user's implements them.
_NAMESPACES = frozenset({"aten", "prims", "ipu", "quantized_decomposed"})
_PYTHON = "getitem"
_HOST_CALL = str(host_call)


def write_operators(programs: Iterable[Program]) -> dict[str, str]:
    """The operators that programs call, each with its schema.

    Raises:
        SavedProgramError: one is not of this package or PyTorch, so that no other process may have
            it.
    """
    schemas = {}
    for program in programs:
        for function in (*program.functions, *program.update_functions):
            for node in function.operators:
                name = _name(node)
                if (problem := _problem(name)) is not None:
                    raise SavedProgramError(
                        Reason.CANNOT_SAVE,
                        f"{_called(node, name)} {problem}",
                        part=source_line(node),
                        hint="compute it with PyTorch's own operators, or outside of the model",
                    )
                schemas[name] = _schema(name)
    return schemas


def check_operators(written: Any) -> frozenset[str]:
    """Compare operators as `write_operators` listed them with those that are here.

    Raises:
        SavedProgramError: an operator is missing, has another schema, or may not be called by
            programs.
    """
    for name, schema in expect(written, dict, "the list of operators").items():
        if (problem := _problem(name)) is not None:
            raise SavedProgramError(Reason.OPERATOR, f"{name} {problem}")
        try:
            here = _schema(name)
        except ValueError as error:
            raise SavedProgramError(Reason.OPERATOR, str(error)) from error
        if here != schema:
            problem = f"it was saved with {schema}, and here is {here}"
            raise SavedProgramError(Reason.OPERATOR, problem)
    return frozenset(written)


def check_program(program: Program, listed: frozenset[str]) -> None:
    """Raise SavedProgramError for an operator of `program` that is not listed."""
    for function in (*program.functions, *program.update_functions):
        for node in function.operators:
            if (name := _name(node)) not in listed:
                problem = f"@{function.name} calls {name}, which is not listed"
                raise SavedProgramError(Reason.OPERATOR, problem)


def _called(node: fx.Node, name: str) -> str:
    """How an error calls the operator of a node; the host's functions by their own names."""
    return f"the host function {node.args[1]}" if calls_host(node) else f"the operator {name}"


def _name(node: fx.Node) -> str:
    try:
        return operator_name(node.target)
    except ValueError:
        return str(node.target)


def _problem(name: str) -> str | None:
    """Why saved programs do not call an operator; None if they may."""
    namespace = name.partition(".")[0]
    if name == _HOST_CALL:
        return "is Python of the process that compiled it"
    if name != _PYTHON and namespace not in _NAMESPACES:
        return f"is none of {', '.join(sorted(_NAMESPACES))}"
    return unchecked(name)


def _schema(name: str) -> str:
    """The schema of an operator: its arguments and results.

    Raises:
        ValueError: no operator has that name.
    """
    operator: Any = operator_named(name)
    return "" if name == _PYTHON else str(schema_of(operator))
