"""Every hook of the contract in plain torch: oracle of the conformance kit and last resort."""
