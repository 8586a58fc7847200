"""Hold a program under conversion: a flat graph of named nodes, taken from an exported program.

Every node carries its canonical name and a value; the way back gives an exported program again.
"""
