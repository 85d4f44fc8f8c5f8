"""What every request passes on its way to a route, one layer in a file."""
