"""Parts of the `migrate` experiment: sessions that go from one server to another."""
