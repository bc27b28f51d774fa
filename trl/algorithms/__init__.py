"""Algorithms: the columns they need, how rewards become advantages, and the losses."""
