"""Every experiment in one go, and the page that leads to their reports."""
