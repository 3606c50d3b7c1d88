"""Everything that is said of a configuration without a model: lint, check, resolve, diff."""
