"""Apply optimiser updates in place: one file for each rule, and what they share."""
