"""The OpenAPI document, in the forms that generators of clients understand."""
