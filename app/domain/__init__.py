"""The vocabulary that every room shares: ids, enums, breakpoints, errors, small frozen values."""
