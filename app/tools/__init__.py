"""How a family of models thinks and calls tools, what holds a model to that, and how its answers are read."""
