"""The suite of variants of attention: its problems, its engines and their peers."""
