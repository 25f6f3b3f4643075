"""What stands between clients and servers: a router of our own, and one that keeps sglang-router's up to date."""
