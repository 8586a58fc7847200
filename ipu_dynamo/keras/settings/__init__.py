"""Hold the user's settings of a model: enumerations, one frozen value, keywords, checks."""
