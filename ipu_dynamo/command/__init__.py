"""The command `ipu-dynamo`: predictions, and `doctor`, which looks at an installation.

`subcommands.py` reads the arguments and imports nothing that needs PyTorch. So `doctor` also
answers where PyTorch is missing, or is of another version.
"""
