"""Define the operators of recurrent layers: a pair for one layer in one direction, over all steps.

`ipu::lstm`, `ipu::gru` and `ipu::rnn` also return the gates, which their backward operator reads.
So a program is the same on every machine. Here each is a loop over PyTorch's operators: the
reference for faster implementations.
"""
