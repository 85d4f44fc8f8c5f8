"""`djinn doctor`: one file for each thing that it examines."""
