"""Keep memory, disk and processors within what sessions and tenants may have of them."""
