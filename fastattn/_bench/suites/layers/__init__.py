"""The suite of layers: its problems, its engines and their peers."""
