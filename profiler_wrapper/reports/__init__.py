"""A result in; text, picture or page out."""
