"""How updates are made fast on a device: settings, recordings, kernels. What is computed stays the same."""
