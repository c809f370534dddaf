"""The cache on the device: pools, the prefix index, and the owners of a row's slots and pages."""
