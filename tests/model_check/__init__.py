"""Every interleaving of a small transfer: the real state machines, a model of what is around them, and an explorer."""
