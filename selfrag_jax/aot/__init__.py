"""Programs that are compiled and not run: what each needs of devices that need not exist."""
