"""Rewrite the user's operators, before autograd.

Every operator has the user's source line; placeholders and outputs are described; markers are still
where the model put them. `Differentiate` is the last pass.
"""
