"""Record what one step of an optimiser does to parameters and states: a graph with its numbers as
inputs, and what Python decided by them as conditions. `passes/update/` rewrites it."""
