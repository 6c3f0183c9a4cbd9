"""What `cut` and `resolve` are made of: from matches to registrations."""
