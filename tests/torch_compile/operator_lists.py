"""List which operators of PyTorch's database do not go through torch.compile, and why.

Names are those of the database. A test fails for an operator that fails and is not listed, for one
that is listed and passes, and for one that fails with another message than its group's.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Operators that fail for one reason.

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


# Eager PyTorch cannot run them on a CPU either.
NOT_IN_EAGER = [
    "jiterator_2inputs_2outputs",
    "jiterator_4inputs_with_extra_args",
    "jiterator_binary",
    "jiterator_binary_return_by_ref",
    "jiterator_unary",
]

# The shape of what they compute depends on values: outside what a static program can be.
OUTSIDE = (
    Group(
        "the number of results depends on the values of a tensor",
        "the shape of a result depends on the values of a tensor",
        "argwhere masked_select nonzero tensor_split unique unique_consecutive",
    ),
    Group(
        "values decide how many residuals a solution has, and how much the CTC loss saves",
        "Dynamic shape operator",
        "linalg_lstsq linalg_lstsq_grad_oriented nn_functional_ctc_loss",
    ),
    Group(
        "the number of stored elements depends on the values of a tensor",
        "torch.compile does not support sparse Tensors",
        "to_sparse",
    ),
)

FAILURES = (
    Group(
        "PyTorch cannot capture an operator that looks at values and answers in Python",
        "Data dependent operator",
        "allclose equal",
    ),
    Group(
        "PyTorch cannot capture the check of the variances, an if statement on their values",
        "Could not guard on data-dependent expression",
        "nn_functional_gaussian_nll_loss",
    ),
    Group(
        "PyTorch cannot capture sparse tensors",
        "torch.compile does not support sparse Tensors",
        "sparse_mm_reduce sparse_sampled_addmm",
    ),
    Group(
        "PyTorch cannot capture a change of a tensor's size in place",
        "resize_",
        "resize_ resize_as_",
    ),
    Group(
        "the offset of a view is the value of a tensor",
        "the shape of a result depends on the values of a tensor",
        "narrow",
    ),
)

# What they return is undefined, so shapes and dtypes are compared alone.
UNDEFINED_VALUES = [
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
]
