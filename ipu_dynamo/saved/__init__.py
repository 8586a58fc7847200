"""Write programs with all that belongs to them into one file, and read it back.

A file holds data only: reading one runs nothing of it, and takes memory in proportion to its size.
A damaged or unsuitable file raises one kind of error, with one reason.
"""
