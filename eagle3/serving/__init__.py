"""From a trained head to a served one: export, check, measure."""
