"""Parts of the application's wiring."""
