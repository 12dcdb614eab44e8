"""How a graph of roles comes to life: in one process, in many, or on a Ray cluster; knows nothing of learning."""
