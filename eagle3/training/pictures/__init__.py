"""What a training and a sweep look like. matplotlib comes with an extra: nothing imports these files but to draw."""
