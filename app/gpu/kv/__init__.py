"""KV blocks as book-keeping: who shares them, orders to move them, files of them."""
