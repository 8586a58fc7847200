"""Choose what forward passes keep for backward passes, and compute the rest again.

Values stay, to the last bit: what is rematerialised is what was computed.
"""
