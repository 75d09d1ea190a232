"""Makes tests/ importable for the helpers that several packages' tests share."""
