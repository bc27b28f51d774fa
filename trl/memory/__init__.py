"""Memory: measured phase by phase, drawn over time, given back, and recovered when it runs out."""
