"""Decide how each function becomes a callable on this machine, one function at a time.

`MakeRecipes` gives every function a recipe. Later passes rewrite recipes, never functions.
"""
