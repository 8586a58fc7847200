"""Read the bytes of a `.pt2` file before PyTorch does, and refuse what is more than data.

What comes out of here are plain tensors and a program of known operators, sizes and names. Nothing
of a file was unpickled, evaluated, imported or looked up by attribute to get there.
"""
