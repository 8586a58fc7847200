"""Find the loss that training minimises, and make it one number."""
