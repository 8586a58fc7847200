"""Find the stage of every node of a converted program: in a file, by expressions, or by a search.

The same costs and bytes give the same stages. The result is written into files that `load` reads.
Stages follow the data, and none is empty.
"""
