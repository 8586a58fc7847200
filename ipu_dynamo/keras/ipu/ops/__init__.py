"""Offer the names of TensorFlow's `ipu` that Keras programs use."""
