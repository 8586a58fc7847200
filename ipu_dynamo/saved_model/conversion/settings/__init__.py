"""Check what a conversion is told, alone and together, before any work.

Values are frozen here; nothing of a program is known.
"""
