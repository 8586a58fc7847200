"""Apply optimiser updates in place: by launches of `ipu_dynamo/ops/updates/`, or traced functions.

An update reads and writes the tensors that it was made from. `prepare` writes neither parameters
nor states; `write` does.
"""
