"""ringmem: GPU memory for Python."""
