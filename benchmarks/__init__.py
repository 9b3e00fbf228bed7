"""The benchmarks of distseg: a script a question. See README.md."""
