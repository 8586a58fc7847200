"""Find where a program computes something else than the model that it was made from."""
