"""Convert a saved program for IPUs: passes rewrite it, and each leaves a graph that computes.

Nothing is read here, and nothing written before all of it is done: an output folder is absent or
complete.
"""
