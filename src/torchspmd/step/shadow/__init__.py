"""Shadow steps: calls of a compiled step that are made eagerly too, and compared."""
