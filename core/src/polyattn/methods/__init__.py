"""Methods: one dense call with a place becomes calls of families, by the rules of a paper or of a model."""
