"""What goes wrong in a run, or ends it: bad steps, hangs, signals, too little memory."""
