"""What is said of parameters and their uses: matrices, pieces, slopes, uses, registrations."""
