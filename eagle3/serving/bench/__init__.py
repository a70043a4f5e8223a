"""The plain target and the head under the same loads."""
