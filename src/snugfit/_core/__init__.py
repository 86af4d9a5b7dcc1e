"""The nouns of the system: frozen, JSON-able, and free of torch."""
