"""From what a caller passed to checked argument objects: the only package that raises for user input."""
