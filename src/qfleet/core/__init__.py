"""What every other part may import: messages, protocols, the role contract, config, errors, seeding, statistics."""
