"""Sessions of clients that know of none: bound to calls of other APIs, and parked by what their turns call."""
