"""List which operators of PyTorch's database `compile_training` refuses, and why.

A test fails for an operator that is refused and not listed, for one that is listed and passes, and
for one that is refused with another message than its group's.
"""

from tests.torch_compile.operator_lists import Group

# Values decide the shape of what they compute, or what Python does: no static program has them.
OUTSIDE = (
    Group(
        "the number of results depends on the values of a tensor",
        "the shape of what",
        "argwhere bincount linalg_lstsq linalg_lstsq_grad_oriented masked_select nonzero "
        "repeat_interleave unique unique_consecutive",
    ),
    Group(
        "they answer in Python, or cut a tensor at places that are values",
        "Python code depends on the value of a tensor",
        "allclose equal item narrow tensor_split",
    ),
    Group(
        "the number of stored elements depends on the values of a tensor",
        "of layout torch.sparse_coo",
        "nn_functional_embedding to_sparse",
    ),
)

FAILURES = (
    Group(
        "the gradient of the value that is filled in is a sum over unique indices",
        "aten._unique",
        "index_fill",
    ),
)

# Modules of which some samples are refused.
MODULE_SAMPLES: tuple[Group, ...] = ()
