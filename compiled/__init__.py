"""Every compiled form of the steps, proved and exported."""
