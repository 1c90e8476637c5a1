"""What the judge's own tests are made of: emulated arithmetic, trials without a cell, campaigns
that never ran."""
