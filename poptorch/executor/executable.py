"""Describe what an executor has compiled, and for which arguments."""

from dataclasses import dataclass
from typing import Any

from ipu_dynamo.program import Program
from ipu_dynamo.program.ir.types import counted
from poptorch.arguments import CallArguments


@dataclass(frozen=True, repr=False)
class ExecutableInfo:
    """The program that an executor runs. It has no weights of its own.

    Args:
        name: of the model's class.
        program: the work of the IPUs.
        training: whether a run trains.
        replicas: how many copies of the program run.
    """

    name: str
    program: Program
    training: bool
    replicas: int

    def __repr__(self) -> str:
        kind = "training" if self.training else "inference"
        ipus = counted(self.program.num_ipus, "virtual IPU")
        replicas = counted(self.replicas, "replica")
        return f"<executable of {self.name}: {kind} on {ipus}, {replicas}>"


@dataclass(frozen=True)
class ExecutableInputs:
    """The arguments that an executor was compiled for.

    Args:
        args: of all parameters that can be given by position, with defaults and full batches.
        arg_names: the names of these parameters.
        kwargs: the other arguments.
    """

    args: list[Any]
    arg_names: list[str]
    kwargs: dict[str, Any]


def inputs_of(call: CallArguments) -> ExecutableInputs:
    """Sort the arguments of the call that an executor was compiled for."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, value in call.values.items():
        if name.startswith("**"):
            kwargs |= value
        elif name.startswith("*"):
            args += value
        elif name in call.names:
            args.append(value)
        else:
            kwargs[name] = value
    return ExecutableInputs(args, list(call.names), kwargs)
