"""What a GPU shows that a compiler cannot: whether kernels are right there, and how fast they and programs are."""
