"""Rewrite a program for the machine that runs it."""
