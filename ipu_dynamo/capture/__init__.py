"""Turn models into Captures: trace the Python once, describe every tensor."""
