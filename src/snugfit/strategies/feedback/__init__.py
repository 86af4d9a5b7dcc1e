"""Learning without backpropagation through the network: DFA, DRTP and PEPITA, for comparison."""
