"""List which operators of PyTorch's database a front end refuses, and why: all of them are here.

Names are those of the database. A test fails for an operator that is refused and not listed, for
one that is listed and passes, and for one that is refused with another message than its group's.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Operators that are refused for one reason.

    Args:
        message: a part of the error that each of them raises.
        operators: their names, separated by spaces.
    """

    reason: str
    message: str
    operators: str

    @property
    def names(self) -> list[str]:
        return self.operators.split()


def by_name(groups: Iterable[Group]) -> dict[str, Group]:
    """The group of each operator."""
    return {name: group for group in groups for name in group.names}


# Eager PyTorch cannot run them on a CPU either.
NOT_IN_EAGER = [
    "jiterator_2inputs_2outputs",
    "jiterator_4inputs_with_extra_args",
    "jiterator_binary",
    "jiterator_binary_return_by_ref",
    "jiterator_unary",
]

# What they return is undefined, so shapes and dtypes are compared alone.
UNDEFINED_VALUES = [
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
]

# They begin with random numbers, which are others in a program, and end close by at best: signs of
# vectors differ.
RANDOM_BEGINNINGS = ["pca_lowrank", "svd_lowrank"]

# Through torch.compile: values decide the shape, or the number of stored elements, of what they
# take or compute: outside what a static program can be.
OUTSIDE_COMPILE = (
    Group(
        "the number of results depends on the values of a tensor",
        "the shape of a result depends on the values of a tensor",
        "argwhere bincount masked_select nonzero tensor_split unique unique_consecutive",
    ),
    Group(
        "values decide how many residuals a solution has",
        "Dynamic shape operator",
        "linalg_lstsq linalg_lstsq_grad_oriented",
    ),
    Group(
        "the number of elements that a sparse tensor stores depends on its values",
        "torch.compile does not support sparse Tensors",
        "sparse_mm_reduce sparse_sampled_addmm to_sparse",
    ),
)

# Through torch.compile: shapes are static, and they are refused all the same.
FAILURES_COMPILE = (
    Group(
        "they answer with a truth value of Python, which PyTorch's capture has no symbol for",
        "Data dependent operator",
        "allclose equal",
    ),
    Group(
        "PyTorch cannot capture the check of the variances, an if statement on their values",
        "Could not guard on data-dependent expression",
        "nn_functional_gaussian_nll_loss",
    ),
    Group(
        "PyTorch cannot capture a change of a tensor's size in place",
        "resize_",
        "resize_ resize_as_",
    ),
)

# In compile_training: values decide the shape of what they compute, or what Python does.
OUTSIDE_TRAINING = (
    Group(
        "the number of results depends on the values of a tensor",
        "the shape of what",
        "argwhere bincount linalg_lstsq linalg_lstsq_grad_oriented masked_select nonzero "
        "repeat_interleave unique unique_consecutive",
    ),
    Group(
        "they answer in Python, or cut a tensor in parts whose lengths are values",
        "Python code depends on the value of a tensor",
        "allclose equal item tensor_split",
    ),
    Group(
        "the number of stored elements depends on the values of a tensor",
        "of layout torch.sparse_coo",
        "nn_functional_embedding to_sparse",
    ),
    Group(
        "the same of its gradient, whose shape PyTorch gets wrong while tensors have no values",
        "Attempting to broadcast a dimension",
        "nn_functional_embedding_bag",
    ),
)

# In compile_training: shapes are static, and they are refused all the same.
FAILURES_TRAINING = (
    Group(
        "the result is a view of memory that begins at a place that is the value of a tensor",
        "Python code depends on the value of a tensor",
        "narrow",
    ),
)

# Modules of which compile_training refuses some samples.
MODULE_SAMPLES: tuple[Group, ...] = ()
