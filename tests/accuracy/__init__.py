"""What a topology does to the answers: equality with the undivided server, and the recall table (docs/accuracy.md).

`python -m tests.accuracy --help` shows how the table is made.
"""
