"""Lay a model over a mesh, see every byte it sends, prove it right, run it as one graph."""
