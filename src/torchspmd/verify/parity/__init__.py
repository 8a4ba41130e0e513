"""A parallel step against the same step on one device."""
