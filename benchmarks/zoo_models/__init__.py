"""The models of the zoo, a table for each library."""
