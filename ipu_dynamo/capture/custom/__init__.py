"""Record what users define themselves: autograd functions, custom operators, calls of the host."""
