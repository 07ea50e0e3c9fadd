"""What a run leaves behind: its folder, its ledger, its page."""
