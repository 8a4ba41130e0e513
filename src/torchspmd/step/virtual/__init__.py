"""N ranks of a program in one process, and what is certified by running them."""
