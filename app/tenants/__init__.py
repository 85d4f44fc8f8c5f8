"""Tenants: who calls, what each may see, how much each may use, and a record of what each did."""
