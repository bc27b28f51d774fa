"""Memory: plan it, measure it by phase, chart it, free it, and recover when it runs out."""
