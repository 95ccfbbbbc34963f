"""The suite of other normalisers and scores: its problems, its engines and their peers."""
