"""Hold this checkout against another: graphs, bits, memory and time of the same small models."""
