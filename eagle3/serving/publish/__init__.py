"""A folder that is ready to publish: an exported head with its measurements, licences and hashes."""
