"""Define the operators of recurrent layers: a pair for one layer in one direction, over all steps.

`ipu::lstm`, `ipu::gru` and `ipu::rnn` give what their backward operator reads, the gates, as a
result, so that a program is the same wherever it runs. Here they are a loop over PyTorch's
operators, the reference for whatever is faster on a machine.
"""
