"""Agents: networks, heads, targets, losses and updates as pure functions and small modules."""
