"""Run the traced steps of `keras.step`: options, programs, batches and results.

A program computes in the memory of Keras' own variables. So its writes are visible in Keras, and
assignments of the host take effect at the next call.
"""
