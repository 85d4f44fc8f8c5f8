"""Does the load generator itself tell the time right? Its figures of a server whose delays are known."""
