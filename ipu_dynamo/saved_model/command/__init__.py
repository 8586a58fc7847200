"""The command `ipu-saved-model`: its output and exit status. It computes nothing itself."""
