"""Record compilations and calls of a process, for Perfetto and for PyTorch's profiler.

Parts of the compiler and the runtime report spans to `recording.py`, which knows none of them.
While nothing is recorded, a step makes no call for it.
"""
