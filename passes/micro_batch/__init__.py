"""Split the batch of a graph that torch.compile captured into micro-batches."""
