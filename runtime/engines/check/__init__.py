"""Check compiled functions on their first values: compare them with operator by operator.

`limits` has every number. `classes` says how a graph's results may differ. `roundings` moves
results as another order of roundings would. `runs` runs a graph operator by operator, also with
moved roundings. `judge` compares, part by part. `checked_stage` does all of this when a function
first runs.
"""
