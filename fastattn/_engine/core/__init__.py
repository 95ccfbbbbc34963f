"""The compiled layer: fills the structs of src/interface/, runs their tasks, knows no semantics."""
