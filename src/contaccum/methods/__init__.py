"""What a training run is: the table of methods, the configuration, and the loss that both decide."""
