"""Measure, in one run, what the README says about speed."""
