"""Hold the tensors of a program's variables, wherever they live, and what steps record of them.

Every variable has one owner, `storage.py`; only what is in streaming memory lies elsewhere.
"""
