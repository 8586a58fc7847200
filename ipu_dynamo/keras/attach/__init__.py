"""Attach to Keras: strategies, the hooks of a scope, extended classes.

Outside of scopes nothing of Keras or PyTorch is changed, and no thread sees another one's scope.
"""
