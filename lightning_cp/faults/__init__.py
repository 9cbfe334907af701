"""Nobody is left hanging: ranks watch each other by messages apart from the data's, and name who failed."""
