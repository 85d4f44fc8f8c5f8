"""The engine: everything that plans, holds and computes what sessions ask for."""
