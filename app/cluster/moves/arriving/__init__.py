"""Sessions that come from other servers."""
