"""Triton kernels, each beside a wrapper over tensors; only who uses one imports its file, which loads Triton."""
