"""Gradients in fewer bytes: several lossy ways to write one, and what keeps the loss from mattering."""
