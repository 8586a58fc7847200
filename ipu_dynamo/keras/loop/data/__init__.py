"""Read data: adapters, batches of one form, epochs, a thread that reads ahead of the program."""
