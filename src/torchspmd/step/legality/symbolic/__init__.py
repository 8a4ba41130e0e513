"""What each node of a graph computes, as a value that can be compared across graphs."""
