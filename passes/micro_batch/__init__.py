"""Split the batch of a graph that torch.compile captured into micro-batches.

One table has the rule of each operator for a part of the batch; other operators are refused.
`split_batch` gives every value its placement and changes nothing; `cut_batch` follows it.
"""
