"""Fields of a body that a route does not declare: kept, named in the answer, or refused."""
