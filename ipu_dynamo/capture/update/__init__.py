"""Record one step of an optimiser as a graph on parameters and states.

Its numbers are inputs of the graph, and decisions of Python by them are conditions.
`passes/update/` rewrites the graph.
"""
