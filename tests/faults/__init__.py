"""`make faults`: break running pairs and servers on purpose, and see that nothing is lost, leaked or hung.

`python -m tests.faults --help` shows the options; docs/reliability.md is made from what it finds.
"""
