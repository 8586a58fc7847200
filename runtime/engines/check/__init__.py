"""Check compiled functions on their first values: compare them with operator by operator.

`limits` has every number, `classes` says what a graph's results may differ in, `runs` runs a graph
operator by operator, also with moved roundings, `judge` compares, in parts that `slices` cuts, and
`checked_stage` does it all when a function runs first.
"""
