"""The `explain` command: a hand-over on paper, without any server."""
