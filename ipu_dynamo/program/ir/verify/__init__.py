"""Refuse programs that cannot run as they read: `program.py` walks one, others check parts.

Programs are verified where they are emitted, parsed, and before they run.
"""
