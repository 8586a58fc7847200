"""Model an IPU's memory and cycles: predict from a program alone what an IPU system would need.

A prediction reads the program and nothing of this computer; it runs nothing and makes no tensor.
"""
