"""Record calls of PyTorch's layers and losses otherwise than operator by operator.

The recorded operators compute the same values. The calls are replaced only while a model is traced.
"""
