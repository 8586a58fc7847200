"""Do what `fit`, `evaluate`, `predict` and the like of extended models do.

Steps, data, results and callbacks; the programs themselves are made in `step/`. Every thread that
is started here has ended when the method returns or raises.
"""
