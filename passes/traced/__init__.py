"""Rewrite what the user wrote, before autograd.

Every operator has the user's source line; placeholders and outputs are described; markers still
stand where the model put them. `Differentiate` is the last one.
"""
