"""Deliberate faults in describe, plan, bind and merge, each of which the tests must notice: `make mutants`."""
