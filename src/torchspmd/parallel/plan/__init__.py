"""Which style each module gets: plans resolved as a whole, previewed, inferred."""
