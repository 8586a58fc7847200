"""Export an extended model as a saved program that calls an executable."""
