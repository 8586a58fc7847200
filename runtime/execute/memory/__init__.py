"""Hold the tensors of a program's variables, wherever they live, and the records of steps.

`storage.py` owns every variable, except those in streaming memory.
"""
