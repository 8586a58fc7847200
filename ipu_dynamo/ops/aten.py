"""Name PyTorch's own operators in tables that survive a PyTorch without some of them.

    aten.mm.default         the operator, as torch.ops.aten.mm.default
    aten.gone.default       a MissingOperator: no node calls it
    aten.mm.packet          all overloads, as torch.ops.aten.mm

Passes have tables of operators, which are made at import. A new PyTorch may rename or drop one:
then its entry is never looked up, and a call of the operator raises an error with its name.
"""

from typing import Any, NoReturn

import torch

from ipu_dynamo.errors import IpuError


class MissingOperator:
    """An operator that this PyTorch lacks, or all overloads of one; its attributes are missing too.

    Each access makes an object of its own: none is equal to anything else.
    """

    def __init__(self, name: str) -> None:
        self._text = name

    def __getattr__(self, name: str) -> "MissingOperator":
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingOperator(f"{self._text}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise IpuError(
            f"PyTorch {torch.__version__} has no operator {self._text}\n"
            "  try:  a PyTorch of the range that this package is installed with"
        )

    def __repr__(self) -> str:
        return self._text


class _Overloads:
    """The overloads of an operator; each is looked up once.

    Attributes:
        packet: PyTorch's object for all of them.
    """

    def __init__(self, name: str, packet: Any) -> None:
        self._name, self.packet = name, packet

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        operator = getattr(self.packet, name, None) or MissingOperator(f"{self._name}.{name}")
        setattr(self, name, operator)
        return operator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.packet(*args, **kwargs)


class _Operators:
    """PyTorch's operators by name; each is looked up once."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        packet, text = getattr(torch.ops.aten, name, None), f"aten.{name}"
        found = MissingOperator(text) if packet is None else _Overloads(text, packet)
        setattr(self, name, found)
        return found


aten: Any = _Operators()
