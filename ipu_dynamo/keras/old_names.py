"""Make `keras.ipu` and `keras.ipu.extensions` names of this package, as in old programs."""

import sys
import warnings

import keras

NAME = "keras.ipu"


def name_in_keras() -> None:
    """Register the names; a `keras.ipu` of somebody else stays, with a warning."""
    package = sys.modules["ipu_dynamo.keras"]
    present = sys.modules.get(NAME, getattr(keras, "ipu", None))
    if present is not None and present is not package:
        warnings.warn(
            f"there is a module {NAME} already, and it stays: import ipu_dynamo.keras instead",
            stacklevel=3,
        )
        return
    sys.modules[NAME] = package
    sys.modules[f"{NAME}.extensions"] = sys.modules["ipu_dynamo.keras.extensions"]
    keras.ipu = package
