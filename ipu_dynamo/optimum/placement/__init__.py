"""Place a model's layers on IPUs by a configuration, and undo it exactly.

Plans read the model. Changes are recorded outside of the model, not as its attributes.
"""
