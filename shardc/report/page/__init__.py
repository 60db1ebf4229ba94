"""Plans and recorded runs as an HTML page, as small HTML for notebooks, and the picture of one program."""
