"""Find what training minimises, and make it one number."""
