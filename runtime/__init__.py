"""Run programs: engines make callables of functions, an executable runs the instructions."""
