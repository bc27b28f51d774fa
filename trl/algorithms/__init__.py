"""Algorithms: what they need, how rewards become credit, and what they minimize."""
