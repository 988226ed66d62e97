"""The name, file and block layers over the KV port, and sessions. Functions over a transaction."""
