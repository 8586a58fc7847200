"""Turn users' inputs on a command line into arrays. Nothing that they write is executed, and
nothing is unpickled."""
