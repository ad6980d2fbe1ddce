"""Values of config fields that have a grammar of their own."""
