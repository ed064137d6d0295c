"""The contract cases, by part of the contract; ``checks.CASES`` is the one ordered list of them."""
