"""Tools: how a family of models writes its calls, what holds a model to them, and how they are read back."""
