"""Hold what users set on a model: enumerations, one frozen value, the keywords and checks."""
