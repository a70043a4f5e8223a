"""What lies on disk: files that are whole or absent, sealed records, folders wherever they are, one writer each."""
