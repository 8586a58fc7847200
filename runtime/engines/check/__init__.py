"""Check compiled functions on their first values: compare them with operator by operator.

`limits` has every number. `classes` says how a graph's results may differ. `runs` runs a graph
operator by operator, also with moved roundings. `judge` compares, in parts that `slices` cuts.
`checked_stage` does all of this when a function first runs.
"""
