"""Measure, in one run, what the README says about speed.

Every contender runs in a process of its own (`child.py`). Models are in `models.py`; a training is
data, and `work.py` and `jax_peer.py` make steps of it. Kinds of cases: times of steps (`cases.py`),
peak memory (`peak_memory.py`), first steps (`first_call.py`), and graphs and bits next to those of
another checkout (`against/`).
"""
