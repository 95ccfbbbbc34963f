"""Checks that turn a caller's arguments into argument objects; no other package raises for user input."""
