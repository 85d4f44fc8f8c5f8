"""Sessions that move from one server to another: offered, sent, taken, asked after."""
