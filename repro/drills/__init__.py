"""Faults that are put into training by hand, and who notices; see docs/drills.md."""
