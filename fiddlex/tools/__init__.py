"""What commands alone use: analyses and tools beside training. No other package of fiddlex imports them."""
