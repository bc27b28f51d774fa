"""The online skeleton and the algorithms on it."""
