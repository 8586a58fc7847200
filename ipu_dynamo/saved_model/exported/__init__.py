"""Know exported programs: their nodes by name, what goes in and out, their files, how they run.

Nothing here knows of tags, signatures or folders.
"""
