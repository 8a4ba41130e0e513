"""Work that runs in the next iteration."""
