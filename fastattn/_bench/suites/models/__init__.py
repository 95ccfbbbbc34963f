"""The suite of models: its problems, its engines and their peers."""
