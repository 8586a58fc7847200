"""Run models: what `trainingModel` and `inferenceModel` return, in parts.

An executor has at most one program: a call traces and compiles where there is none. Whoever uses
its device or the weights there holds its lock.
"""
