"""Write configurations to folders and the Hub, and read what any release has written.

A file is read as data and repaired before it becomes a configuration; every repair is logged.
"""
