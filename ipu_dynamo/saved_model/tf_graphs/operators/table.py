"""Register the functions of all operators; import this before looking one up."""

from ipu_dynamo.saved_model.tf_graphs.operators import (  # noqa: F401  each registers its own
    elementwise,
    images,
    parts,
    products,
    reductions,
    shapes,
)
from ipu_dynamo.saved_model.tf_graphs.operators.registry import function_of, names

__all__ = ["function_of", "names"]
