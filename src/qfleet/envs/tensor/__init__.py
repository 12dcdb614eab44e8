"""Tensor-native environments: thousands of games stepped by a few tensor operations, on any device."""
