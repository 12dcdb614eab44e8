"""What watches and steers a run from outside its roles."""
