"""Write programs as text, and read them back: `parse(str(x)) == x`.

Nothing in a text is run. A mistake in it is an error that names its line.
"""
