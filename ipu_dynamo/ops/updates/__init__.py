"""Define the steps of optimisers: each rule is a function over one parameter, and an operator.

`update_functions.py` has the functions, and `update_values.py` writes them into graphs.
`update_kernels.py` runs a rule for lists of parameters, with PyTorch's fused kernels where these
exist. `update_operators.py` makes operators such as `ipu::adam` of both.
"""
