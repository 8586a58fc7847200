"""Check that Keras is there, on the torch backend, in a version whose private names are known.

Importing this module checks.
"""

import os
import sys
import warnings

MINOR = "3.15"  # private names of Keras are used, all in `private/`


def check() -> None:
    """Import Keras, with the torch backend unless the user has set another.

    Raises:
        ImportError: Keras is missing.
        RuntimeError: it runs on another backend.
    """
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "torch")
    try:
        import keras
    except ImportError as error:
        raise ImportError(
            "ipu_dynamo.keras needs Keras: run pip install '.[keras]' in the checkout"
        ) from error
    backend = keras.config.backend()
    if backend != "torch":
        raise RuntimeError(
            f"ipu_dynamo.keras needs the torch backend of Keras, and Keras runs on {backend}: set "
            "the environment variable KERAS_BACKEND to torch before Keras is imported"
        )
    if keras.__version__.split(".")[:2] != MINOR.split("."):
        warnings.warn(
            f"ipu_dynamo.keras uses private names of Keras {MINOR}, and this is Keras "
            f"{keras.__version__}: what they do there is not known",
            stacklevel=2,
        )


check()
