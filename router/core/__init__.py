"""Pure decisions: load ledger, policies, health, token counting. Time comes in as an argument."""
