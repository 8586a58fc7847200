"""From an optimiser's Python to graphs: what one step does to parameters and states, traced once,
with its numbers as inputs and what it decided by them as a condition."""
