"""The suite of linear attention: its problems, its engines and their peers."""
