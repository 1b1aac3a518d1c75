"""The files of a model: where they are, and what their headers say. Without torch."""
