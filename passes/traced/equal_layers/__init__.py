"""Differentiate one of several equal layers for all of them.

The first pass finds a stack of layers in the traced graph and shortens it to four. The last one
lengthens it again in the joint graph, if the differentiated layers prove to be equal there, too.
"""
