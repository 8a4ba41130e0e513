"""How a step is spread over ranks: replicated, one global batch, or fully sharded."""
