"""What is kept on the device, and whose it is: pools, the prefix index, and the owners of a row's slots and pages."""
