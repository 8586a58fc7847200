"""Give every operator of the user a stage, and every stage an IPU.

Blocks of the model, or a cut into equal times, say which. No marker of a block is left afterwards.
"""
