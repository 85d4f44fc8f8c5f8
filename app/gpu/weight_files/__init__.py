"""The file of weights that a CPU streams: its layout, header, writer, and the page cache."""
