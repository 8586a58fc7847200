"""Check what every call of a compiled model brings, at little cost.

A call goes on only with the arguments, and the model, that the program was compiled for.
"""
