"""Hold the private names of Inductor: the list to go through for a new release."""
