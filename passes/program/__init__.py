"""Write the program from the stages' graphs, and rewrite it as an IPU would run it.

Functions are pure; instructions write lasting variables.
"""
