"""Bring a call's tensors to the IPUs and results back, micro-batch by micro-batch.

A call's tensors are cut as its program's streams say, and results are joined by the streams'
rules. Transfers are timed here.
"""
