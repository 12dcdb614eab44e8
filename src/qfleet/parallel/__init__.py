"""Learners that work together: groups, collectives, and how a network is split over them."""
