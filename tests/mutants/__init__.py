"""Deliberate faults from describing caches to sending them early; the tests must notice each: `make mutants`."""
