"""`sglang-hetero demo`: the main job once, on this machine, checked against the undivided server."""
