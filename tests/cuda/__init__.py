"""What only a GPU can show. `make test-cuda` runs these, and fails where one is skipped."""
