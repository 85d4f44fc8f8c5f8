"""Request and answer bodies of the session API, one file for each resource.

No field is ignored; units are in the names.
"""
