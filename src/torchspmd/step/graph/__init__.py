"""Questions to a step's graph: what its nodes are, cost, hold and communicate."""
