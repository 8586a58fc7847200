"""Place a model's layers on IPUs by a configuration, and undo it exactly.

Plans read the model; what is changed is remembered beside the model, not on it.
"""
