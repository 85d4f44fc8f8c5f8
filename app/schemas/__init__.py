"""What a client may ask. Every field is implemented or refused; none is ignored."""
