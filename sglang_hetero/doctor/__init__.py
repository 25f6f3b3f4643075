"""`sglang-hetero doctor`: what this installation is made of, and whether it goes together (docs/versions.md)."""
