"""What one run computed, kept so that another can be compared with it."""
