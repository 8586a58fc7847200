"""Make Keras models' steps programs: the machine's shape, the module of the step, its update.

A program computes in the memory of Keras' own variables, so what it writes is seen in Keras, and
what the host assigns acts at the next call. Keras' Python runs while a program is traced only.
"""
