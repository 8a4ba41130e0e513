"""Run a training script with fake tensors on a fake device; record what it does."""
