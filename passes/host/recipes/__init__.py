"""Decide how each function becomes a callable on this machine, one function at a time.

From `MakeRecipes` on every function has a recipe; what follows rewrites recipes, never functions.
"""
