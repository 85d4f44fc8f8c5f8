"""Files that clients keep on the server, and batches: requests in a file, done behind everybody else's."""
