"""One case on trial: its launch, its truth, and what every oracle needs to compare them."""
