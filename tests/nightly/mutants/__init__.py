"""Does the suite bite? Seeded mistakes in a copy of the package, each of which must turn tests red."""
