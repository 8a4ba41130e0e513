"""From an edited graph to what is run: in place, by Inductor, as a CUDA graph."""
