"""Read SavedModels of TensorFlow and make exported programs of them, without TensorFlow.

A signature is a flat list of nodes, its variables are constants, and each operator of TensorFlow is
one function on tensors. Nothing of the files is run.
"""
