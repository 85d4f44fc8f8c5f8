"""Parts of the oversubscription experiment: sessions that together grow past the device."""
