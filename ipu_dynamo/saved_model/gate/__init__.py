"""Read the bytes of a `.pt2` file before PyTorch does, and refuse anything but data.

The result is plain tensors and a program of known operators, sizes and names. Until then nothing of
the file is unpickled, evaluated, imported or looked up as an attribute.
"""
