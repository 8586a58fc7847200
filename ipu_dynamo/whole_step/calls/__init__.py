"""Check the arguments and the model in every call, at little cost.

A call goes on only with the arguments, and the model, that the program was compiled for.
"""
