"""What a step may communicate, written as a test."""
