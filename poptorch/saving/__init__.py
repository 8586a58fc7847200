"""Write executors into files, and read them back: PopTorch's part around the core's saved programs.

Only the module in a file is pickled; it is read where the file is this user's own, or is trusted.
"""
