"""Conversations of agents, generated with and without drafts."""
