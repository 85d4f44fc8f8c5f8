"""Several servers as one: sessions that move between them."""
