"""The compiled layer: fills the structs of src/fastattn.h, runs their tasks, knows no semantics."""
