"""Read and write files around programs: the index, JSON of users, folders made as a whole."""
