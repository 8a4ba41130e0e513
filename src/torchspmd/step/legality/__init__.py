"""Whether an edited graph still computes what it computed before."""
