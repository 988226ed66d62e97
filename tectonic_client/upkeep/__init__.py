"""Work that keeps a volume tidy, safe beside running clients."""
