"""Recording what a device does, on the device, and turning recordings into traces."""
