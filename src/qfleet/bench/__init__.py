"""What `qfleet bench` measures: each suite takes turns with its peer in one run and reports ratios."""
