"""Methods over protocols: runs that can be stopped anywhere, one record each."""
