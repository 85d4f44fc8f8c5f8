"""A planned step on the device: launched, walked up the layers, edited, sampled, accounted for."""
