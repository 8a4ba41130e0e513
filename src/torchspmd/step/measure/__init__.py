"""What operators and collectives take on the ranks at hand, and what stays exposed."""
