"""Data types of requests, plans and records: frozen, JSON-able, and free of torch."""
