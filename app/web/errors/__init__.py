"""Errors as answers: their bodies, their statuses, and what a rejected request is told."""
