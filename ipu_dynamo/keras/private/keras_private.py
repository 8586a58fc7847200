"""Give names to what Keras keeps private, so that a new Keras is looked through in one file.

Checked on keras 3.15.1. Each function or name is small and says where it stands in Keras.
"""

from typing import Any

from keras.src.models.functional import Functional as Functional
from keras.src.models.model import Model as Model
from keras.src.models.model import functional_init_arguments as functional_init_arguments
from keras.src.models.sequential import Sequential as Sequential
from keras.src.ops.node import Node as Node
from keras.src.ops.operation import Operation as Operation

CHECKED_VERSION = "3.15.1"


def registered_names() -> dict[Any, str]:
    """Names under which classes were registered for files, by class: `object_registration`."""
    from keras.src.saving import object_registration

    names: dict[Any, str] = object_registration.GLOBAL_CUSTOM_NAMES
    return names
