"""A page that shows round by round what a head drafted and what the target chose."""
