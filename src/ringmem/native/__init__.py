"""Floor 0: the native core. Not an API of its own; the floors above import from here."""
