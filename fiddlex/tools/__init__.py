"""What commands alone use: analyses and tools beside training. Nothing else imports them."""
