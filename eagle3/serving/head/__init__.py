"""The exported head: its format, its files, its export."""
