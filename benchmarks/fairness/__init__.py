"""What one client's server costs another: a victim's waits beside attackers and beside honest neighbours."""
