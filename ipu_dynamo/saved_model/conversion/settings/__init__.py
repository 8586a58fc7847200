"""Check the options of a conversion, alone and together, before any work.

Values are frozen here, and do not depend on a program.
"""
