"""The ordered transactional key-value port and its engines (memory, sqlite, postgresql)."""
