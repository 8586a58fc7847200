"""Store a model's options, stages and seed states in Keras' own files, and restore them.

Plain Keras ignores this data. Without a scope a file loads as a plain model.
"""
