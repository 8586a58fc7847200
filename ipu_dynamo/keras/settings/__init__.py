"""Hold what users set on a model: enumerations, one frozen value, and the keywords with their checks."""
