"""The memory of KV blocks on device and host, and the workers that copy between them."""
