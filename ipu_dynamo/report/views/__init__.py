"""Make view models for reports: pure functions of a `Prediction`, whose results are JSON."""
