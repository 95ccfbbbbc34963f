"""The suite of attention: its problems, its engines and their peers."""
