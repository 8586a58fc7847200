"""Record calls of PyTorch's layers and losses otherwise than operator by operator.

What is recorded computes the same; only such calls are replaced, and only while a model is traced.
"""
