"""Updates that run in the next iteration: which may, where, and in which graphs."""
