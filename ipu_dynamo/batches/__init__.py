"""Make batches in a process of their own, while this process computes.

Items come in order, are the same for the same seed, share memory with their reader, and keep their
values while the reader references them. No process and no shared memory outlives the program.
"""
