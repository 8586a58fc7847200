"""Make steps of Keras models modules that can be traced: shape, variables, stages, draws, update.

Keras' Python runs while a program is traced only.
"""
