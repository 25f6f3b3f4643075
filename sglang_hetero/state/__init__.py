"""What a running server says of itself: the report of each rank, where reports are kept, and what follows from them."""
