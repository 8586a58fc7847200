"""Apply optimiser updates in place: one file for each rule, and what they share.

An update reads and writes the tensors that it was made from. `prepare` writes neither parameters
nor states; `write` does.
"""
