"""Define every `ipu::` operator that graphs may hold, with its meaning.

Passes write them, programs print and parse them by name, every engine can call them. Nothing here
knows a pass, a program or the runtime.
"""
