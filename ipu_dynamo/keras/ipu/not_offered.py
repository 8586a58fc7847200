"""Say of a name of TensorFlow's `ipu` that it is not offered here."""

from collections.abc import Callable
from typing import Any


def not_offered(module: str) -> Callable[[str], Any]:
    """`__getattr__` of a module of the namespace."""

    def refuse(name: str) -> Any:
        if name.startswith("__"):  # Python asks for these itself
            raise AttributeError(name)
        raise AttributeError(
            f"{module}.{name} is not offered here: ipu_dynamo.keras.ipu has what Keras programs "
            "use of ipu, in config, utils, ipu_strategy, ops.pipelining_ops, "
            "gradient_accumulation and serving"
        )

    return refuse
