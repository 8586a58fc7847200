"""Split the batch of a graph that torch.compile captured into micro-batches.

What an operator does with a part of the batch stands in one table; what is not there is refused.
`split_batch` gives every value its placement and changes nothing; `cut_batch` follows it.
"""
