"""Say when and where a model's changes of tensors in place take effect."""
