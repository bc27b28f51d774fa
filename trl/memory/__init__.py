"""Memory: measured by phase, drawn over time, given back, and recovery when it runs out."""
