"""The command `ipu-saved-model`: what it prints, and how it ends. It computes nothing itself."""
