"""Show a prediction as one HTML file or as a trace.

View models (`views/`) are pure functions of a `Prediction`. The script in `assets/` draws them: it
computes no figure. Names in a prediction are data, and reach a page as text only.
"""
