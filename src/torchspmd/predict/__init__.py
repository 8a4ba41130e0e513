"""What a recorded step would hold on a named GPU: pure functions of a recording."""
