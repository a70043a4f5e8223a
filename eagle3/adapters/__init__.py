"""One module per library of which we use private or changing parts; each states the supported versions."""
