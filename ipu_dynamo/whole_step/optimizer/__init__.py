"""Keep a torch optimiser and the updates of a program in step.

Rules and states are translated in both directions; hyperparameters follow at every call, states
when either side asks.
"""
