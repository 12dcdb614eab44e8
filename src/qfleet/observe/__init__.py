"""Where a run's numbers go: files, trackers, lines of text, and comparisons of finished runs."""
