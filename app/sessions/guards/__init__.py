"""Keep memory and disk within what sessions may have of them, for as long as the server runs."""
