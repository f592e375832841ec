"""What a person or a script sees of a run: sentences, the result document, progress in a terminal."""
