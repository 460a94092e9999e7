"""The page of results and its figures, made from result files alone."""
