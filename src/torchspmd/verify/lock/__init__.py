"""What a step sends and holds, kept in a file that is compared in CI."""
