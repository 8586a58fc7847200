"""Write configurations to folders and the Hub, and read the files of any release.

A file is read as data and repaired before it becomes a configuration; every repair is logged.
"""
