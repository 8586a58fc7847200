"""Run what `keras.step` traced: options, programs by their origin, batches and results of calls.

A program computes in the memory of Keras' own variables, so what it writes is seen in Keras, and
what the host assigns acts at the next call.
"""
