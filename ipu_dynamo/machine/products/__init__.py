"""Plan matrix products and convolutions on the tiles of an IPU, as poplibs would.

Plans depend on sizes and on the machine alone, and are kept by them.
"""
