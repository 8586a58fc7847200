"""Price operators, a file for each class of cost. A price is a `Cost` of one run on one IPU."""
