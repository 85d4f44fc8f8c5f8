"""How well a server carries many agents that spend most of their time thinking."""
