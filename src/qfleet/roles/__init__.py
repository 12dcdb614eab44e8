"""The roles of a run: each an ordinary class that does one bounded piece of work at a time and sees only handles."""
