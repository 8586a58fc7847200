"""Choose how this machine computes a program: libraries, convolutions, fused steps, packed weights.

These are rewrites that wait for the host passes; engines and executables call them.
"""
