"""What the server answers. Names carry their unit; token counts are plain integers."""
