"""What is logged: the values that ranks have become the one that one process would show."""
