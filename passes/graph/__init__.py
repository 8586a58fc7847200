"""Hold the shared parts of rewrites: build, find aliases and writes, measure liveness, cut.

Nothing here decides anything, and nothing here knows a pass.
"""
