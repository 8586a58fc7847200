"""Differentiate one of several equal layers for all of them.

A stack of layers is looked for in the traced graph, shortened to four, and lengthened again in the
joint graph, but only where the layers that were differentiated prove to be equal there, too.
"""
