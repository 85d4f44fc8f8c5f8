"""Sessions that go to other servers, and which of them go: at a shutdown, or when memory is nearly full."""
