"""What single functions cost, by pytest-benchmark: `make bench-micro`. Not collected by `make test`."""
