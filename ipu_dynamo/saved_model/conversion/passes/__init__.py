"""Rewrite a draft, one idea per file: a function plans, another applies, and a pass is both.

Each leaves a graph that computes; one whose option is unset changes nothing.
"""
