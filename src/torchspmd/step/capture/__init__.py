"""From an ordinary training step to one functional graph."""
