"""What tests share: small models, scenarios of several processes, observed effects, and fixtures."""
