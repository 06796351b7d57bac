"""The configuration: schema, inheritance, overrides, validation of everything at once."""
