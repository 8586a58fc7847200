"""Read and write what lies around programs: the index, JSON of users, folders made as a whole."""
