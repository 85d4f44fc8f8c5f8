"""Experiments on what is inside the model: many prompts, or many changes of one, behind everybody else's turns."""
