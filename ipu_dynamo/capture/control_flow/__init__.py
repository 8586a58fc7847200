"""Record loops, branches and `vmap`: operators with bodies, which are graphs of their own.

A body reads only operands of its operator: tensors of the model that it uses become operands, too.
"""
