"""Find the stage of every node of a converted program: in a file, by expressions, or by a search.

The same costs and bytes give the same stages. What was found is written into files that `load`
reads; stages follow the data, and none is empty.
"""
