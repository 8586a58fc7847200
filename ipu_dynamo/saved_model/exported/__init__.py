"""Handle exported programs: nodes by name, inputs and outputs, files, and execution.

Nothing here depends on tags, signatures or folders.
"""
