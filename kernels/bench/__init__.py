"""One bench per operation, on the tests' inputs."""
