"""Refuse inputs and attributes that a custom operator does not have."""

from ipu_dynamo.errors import CompileError, called_from


class WrongInputs(CompileError):
    """Inputs or attributes of a custom operator do not go together."""

    id = "operator"

    def __init__(self, problem: str) -> None:
        super().__init__(problem, where=called_from())
